"""Results that a policy keeps, by operation and run, and their names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from ..base import text
from ._offload import Handle, Store
from .checkpoint_policies import Keep, Policy, keep_of, keep_of_name


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors in the arguments of an operation of ATen, which are flat but for lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, Tensor))


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors_in((value,), {})
    return found


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: it always runs again, so that later ones draw theirs."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":  # attention draws only with dropout
            return bool(args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


class Part(NamedTuple):
    """A tensor in the result of an operation."""

    memory: StorageWeakRef
    device: torch.device
    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]


def memory_of(x: Tensor) -> int:
    """A number that tensors share which share memory."""
    try:
        with torch._C.DisableTorchFunction():  # out of sight of modes for functions
            return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of a transform
        return -id(x)


def part_of(x: Any) -> Any:
    """A tensor as a `Part`; other values as they are."""
    if not isinstance(x, Tensor):
        return x
    return Part(StorageWeakRef(x.untyped_storage()), x.device, x.dtype, x.storage_offset(), x.size(), x.stride())


def tensor_of(part: Part) -> Tensor:
    """A tensor again, whose memory is still there."""
    storage = torch.UntypedStorage._new_with_weak_ptr(part.memory.cdata)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, part.offset, part.size, part.stride)


# Which occurrence of an operation: other operations between may differ between two runs.
Place = tuple[Any, int]


_LEAF = tree_flatten(0)[1]


class Step(NamedTuple):
    """An operation that has run."""

    place: Place
    shapes: tuple[torch.Size, ...]  # of its arguments
    form: Any  # the structure of the result
    parts: list[Any]  # of the result: tensors as `Part`s, other values as they are
    number: int  # in the order of the run


class Kept(NamedTuple):
    """The result of an operation."""

    shapes: tuple[torch.Size, ...]  # of its arguments, to be compared
    form: Any  # the structure of the result
    leaves: list[Any]  # its tensors as `Slot`s, other values as they are
    number: int  # of the operation, in the order of the run
    written: bool = False  # whether a later operation writes into it


class Slot(NamedTuple):
    """The place of a tensor among those kept."""

    number: int


class Keeper:
    """Records a run's results that a policy keeps, for later runs.

    Args:
        policy: Which results to keep.
        kept: What its True means.
        store: Where values wait that it offloads.

    Attributes:
        kept: The operations whose results later runs get.
        values: The results kept: tensors, or handles of those that wait elsewhere; None for what is not needed.
        count: The number of operations so far.
    """

    def __init__(self, policy: Policy, kept: Keep, store: Store) -> None:
        self._policy, self._meaning, self._store = policy, kept, store
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.kept: dict[Place, Kept] = {}
        self.values: list[Tensor | Handle | None] = []
        self._away: list[bool] = []  # whether a value is to wait elsewhere
        self._moved: list[tuple[int, Handle]] = []
        self._numbers: dict[int, list[int]] = {}  # memory -> numbers of the values in it
        self._origins: dict[int, Step] = {}  # memory -> the operation that has made it
        self.count = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context for the calls of `made`, `writes` and `named`."""
        with _running(self):
            yield

    def finish(self, last: int | None = None) -> None:
        """The run has ended: move what is to wait elsewhere, and forget what no backward pass uses.

        Args:
            last: The number of operations after which later runs stop; None where they run to the end.
        """
        for place, kept in list(self.kept.items()):
            if last is not None and kept.number > last:
                for leaf in self.kept.pop(place).leaves:
                    if isinstance(leaf, Slot):
                        self.values[leaf.number], self._away[leaf.number] = None, False
        chosen = [i for i, away in enumerate(self._away) if away]
        if chosen:
            values: list[Any] = [self.values[i] for i in chosen]
            for i, x, handle in zip(chosen, values, self._store.put(values), strict=True):
                self.values[i] = handle
                if isinstance(handle, Handle):
                    note_moved(x, handle)
                    self._moved.append((memory_of(x), handle))
        self._numbers, self._origins = {}, {}

    def settle(self, results: Sequence[Tensor]) -> None:
        """The run's results are given to the caller, who may write into them."""
        own = {memory_of(x) for x in results} if self._moved else set()
        for memory, handle in self._moved:
            if memory in own:
                handle.settle()
        self._moved = []

    # -- while it records -----------------------------------------------------------------------

    def made(self, place: Place, shapes: tuple[torch.Size, ...], op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run: keep its result if the policy says so."""
        self.count += 1
        if draws(op, args, kwargs):
            return
        leaves, form = ([out], _LEAF) if isinstance(out, Tensor) else tree_flatten(out)
        if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in leaves):
            return
        makes = {memory_of(x) for x in leaves if isinstance(x, Tensor)} - {
            memory_of(x) for x in tensors_in(args, kwargs)
        }
        step = Step(place, shapes, form, [part_of(x) for x in leaves], self.count)
        for memory in makes:
            self._origins[memory] = step
        keep = keep_of(self._policy, self._meaning, op, *args, **kwargs)
        if keep is Keep.RECOMPUTE:
            return
        if makes:
            self._keep(step, leaves, keep)
        else:  # a view: the memory is kept
            for x in leaves:
                if isinstance(x, Tensor):
                    self._keep_origin(memory_of(x), keep)

    def writes(self, x: Tensor) -> None:
        """An operation is about to write into a tensor: what is kept of its memory is copied."""
        memory = memory_of(x)
        self._origins.pop(memory, None)
        numbers = set(self._numbers.pop(memory, ()))
        for n in numbers:
            value = self.values[n]
            assert isinstance(value, Tensor)
            self.values[n] = value.clone()
        for place, kept in self.kept.items() if numbers else ():
            if any(isinstance(leaf, Slot) and leaf.number in numbers for leaf in kept.leaves):
                self.kept[place] = kept._replace(written=True)

    def named(self, x: Tensor, name: str) -> None:
        """A value has got a name: keep the result of the operation that made it, if the policy keeps values of this name."""
        keep = keep_of_name(self._policy, self._meaning, name)
        if keep is not Keep.RECOMPUTE:
            self._keep_origin(memory_of(x), keep)

    def _keep_origin(self, memory: int, keep: Keep) -> None:
        step = self._origins.get(memory)
        if step is None or step.place in self.kept:
            return
        leaves = []
        for part in step.parts:
            if isinstance(part, Part) and part.memory.expired():
                return
            leaves.append(tensor_of(part) if isinstance(part, Part) else part)
        self._keep(step, leaves, keep)

    def _keep(self, step: Step, leaves: list[Any], keep: Keep) -> None:
        slots: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                self._numbers.setdefault(memory_of(x), []).append(len(self.values))
                slots.append(Slot(len(self.values)))
                self.values.append(x.detach())
                self._away.append(keep is Keep.OFFLOAD)
            else:
                slots.append(x)
        self.kept[step.place] = Kept(step.shapes, step.form, slots, step.number)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.keepers: list[Keeper] = []
        self.listeners: list[tuple[Callable[[Tensor, str], Any], Callable[[Tensor, Handle], Any]]] = []


_THREADS = _Threads()


@contextlib.contextmanager
def _running(keeper: Keeper) -> Iterator[None]:
    _THREADS.keepers.append(keeper)
    try:
        yield
    finally:
        _THREADS.keepers.pop()


@contextlib.contextmanager
def listening(name: Callable[[Tensor, str], Any], moved: Callable[[Tensor, Handle], Any]) -> Iterator[None]:
    """A context in which functions are told of each value that gets a name, and of each that waits elsewhere."""
    _THREADS.listeners.append((name, moved))
    try:
        yield
    finally:
        _THREADS.listeners.pop()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """A context in which nobody is told of anything."""
    outer = _THREADS.keepers, _THREADS.listeners
    _THREADS.keepers, _THREADS.listeners = [], []
    try:
        yield
    finally:
        _THREADS.keepers, _THREADS.listeners = outer


def note_name(x: Tensor, name: str) -> None:
    """A value has got a name."""
    if _THREADS.keepers:
        _THREADS.keepers[-1].named(x, name)
    for named, _ in _THREADS.listeners:
        named(x, name)


def note_moved(x: Tensor, handle: Handle) -> None:
    """A value waits elsewhere."""
    for _, moved in _THREADS.listeners:
        moved(x, handle)


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """The same value, with a name by which a policy of `remat` can keep it.

    What is kept is the result of the operation that made the value, which then does not run again. In torch.compile names
    have no effect.

    Args:
        x: Any tensor.
        name: Its name; several values may have one name.

    Returns:
        The value, not to be written into.

    >>> from fjoin import transforms as tx
    >>> def f(x):
    ...     return torch.sin(tx.checkpoint_name(x * 2, "h"))
    >>> torch.func.grad(tx.remat(f, tx.checkpoint_policies.save_only_these_names("h")))(torch.tensor(0.0))
    tensor(2.)
    """
    if torch.compiler.is_compiling():
        return x
    text("checkpoint_name", name)
    if not isinstance(x, Tensor):
        raise TypeError(f"checkpoint_name takes a tensor, got a {type(x).__name__}")
    return _Name.apply(x, name)  # type: ignore[no-untyped-call,no-any-return]


class _Name(torch.autograd.Function):
    """The identity; below all transforms it tells the record of the running region."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        note_name(x, name)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, name: str) -> tuple[Tensor, Any]:
        return _Name.apply(x, name), in_dims[0]  # type: ignore[no-untyped-call]
