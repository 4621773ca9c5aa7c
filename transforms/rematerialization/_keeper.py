"""What a policy keeps of a run: results of operations of ATen, by operation and number of its run, and their names."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from ..base import checks
from ._offload import HOST, Stashed
from .checkpoint_policies import OFFLOAD, RECOMPUTE, Named, Policy, keep_of, keep_of_name

_UNCOUNTED = (torch.ops.aten.detach.default,)  # hooks on saved tensors use it, too
# Which occurrence of an operation: other operations between may differ between two runs.
Occurrence = tuple[Any, int]


def memory_of(x: Tensor) -> int:
    """A number that tensors share which share memory."""
    try:
        with torch._C.DisableTorchFunction():  # out of sight of modes for functions
            return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of a transform
        return -id(x)


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors in the arguments of an operation of ATen, which are flat but for lists."""
    values = (*args, *kwargs.values())
    flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,))]
    return [x for x in flat if isinstance(x, Tensor)]


def _by_name(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operation by their names."""
    values = {one.name: one.default_value for one in op._schema.arguments}
    return values | dict(zip(values, args, strict=False)) | kwargs


def written_by(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    if not op._schema.is_mutable:
        return []
    values = _by_name(op, args, kwargs)
    return tensors_in([values[one.name] for one in op._schema.arguments if one.is_write], {})


def draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: it always runs again, so that later ones draw theirs."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return bool(_by_name(op, args, kwargs).get("dropout_p", True))  # attention draws only with dropout


class Operation(NamedTuple):
    """An operation that has run."""

    place: Occurrence
    shapes: list[torch.Size]  # of its arguments, to be compared
    form: Any  # the structure of the result
    leaves: list[Any]  # the result; of a step that is kept, the class Tensor in place of tensors
    number: int  # in the order of the run
    slots: Sequence[int] = ()  # of a step that is kept, the places of these in `Keeper.values`
    written: bool = False  # whether a later operation writes into it


class Keeper:
    """Records the results of one run that a policy keeps, for later runs.

    Args:
        policy: Which results to keep.
        meaning: What its True means.

    Attributes:
        kept: The operations whose results later runs get.
        values: The results kept: tensors, or handles of those that wait elsewhere; None for what is not needed.
        count: The number of operations so far.
    """

    def __init__(self, policy: Policy, meaning: CheckpointPolicy) -> None:
        self._policy, self._meaning = policy, meaning
        self.kept: dict[Occurrence, Operation] = {}
        self.values: list[Any] = []
        self._away: list[bool] = []  # whether a value is to wait elsewhere
        self._origins: dict[int, Operation] = {}  # memory -> the operation that has made it
        self.count = 0

    def made(self, place: Occurrence, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run: keep its result if the policy says so."""
        keep = keep_of(self._policy, self._meaning, op, *args, **kwargs)
        by_name = isinstance(self._policy, Named)  # a name may come later
        if keep is RECOMPUTE and not by_name:
            return
        leaves, form = tree_flatten(out)
        tensors, given = [x for x in leaves if isinstance(x, Tensor)], tensors_in(args, kwargs)
        new = set(map(memory_of, tensors)) - set(map(memory_of, given))
        if not new or any(x.layout is not torch.strided for x in tensors):
            return
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        step = Operation(place, [x.shape for x in given], form, leaves, self.count)
        if by_name:
            self._origins.update(dict.fromkeys(new, step))
        if keep is not RECOMPUTE:
            self._keep(step, keep)

    def named(self, x: Tensor, name: str) -> None:
        """A value has got a name: keep the result of the operation that made it, if the policy keeps values of this
        name.
        """
        keep, step = keep_of_name(self._policy, self._meaning, name), self._origins.get(memory_of(x))
        if keep is not RECOMPUTE and step is not None and step.place not in self.kept:
            self._keep(step, keep)

    def writes(self, x: Tensor) -> None:
        """An operation is about to write into a tensor: what is kept of its memory is copied."""
        memory = memory_of(x)
        self._origins.pop(memory, None)
        for place, kept in self.kept.items():
            for slot in kept.slots:
                if memory_of(self.values[slot]) == memory:
                    self.values[slot] = self.values[slot].clone()
                    self.kept[place] = kept._replace(written=True)

    def finish(self, out: Any, last: int | None = None) -> None:
        """The run has ended: move what is to wait elsewhere, and forget what no backward pass uses.

        Args:
            out: The result of the run, into which the caller may write.
            last: The number of operations after which later runs stop; None if they run to the end.
        """
        self._origins = {}
        for place, kept in list(self.kept.items()):
            if last is not None and kept.number >= last:
                for slot in self.kept.pop(place).slots:
                    self.values[slot], self._away[slot] = None, False
        away = [i for i, one in enumerate(self._away) if one]
        results = set(map(memory_of, tensors_in(optree.tree_leaves(out), {}))) if away else set()
        for i, value in zip(away, moved([self.values[i] for i in away]), strict=True):
            if isinstance(value, Stashed) and memory_of(self.values[i]) in results:
                value.settle()
            self.values[i] = value

    def _keep(self, step: Operation, keep: CheckpointPolicy) -> None:
        tensors = [x for x in step.leaves if isinstance(x, Tensor)]
        leaves = [Tensor if isinstance(x, Tensor) else x for x in step.leaves]
        slots = range(len(self.values), len(self.values) + len(tensors))
        self.kept[step.place] = step._replace(leaves=leaves, slots=slots)
        self.values += tensors
        self._away += [keep is OFFLOAD] * len(tensors)


class _Mode(TorchDispatchMode):
    """Numbers the runs of each operation."""

    def __init__(self, keeper: Keeper, values: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeper, self._values, self._counts = keeper, values, Counter[Any]()

    @classmethod
    def of(cls, keeper: Keeper | None, *values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """The mode; where nothing is kept, no mode."""
        return contextlib.nullcontext() if keeper is None else cls(keeper, *values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func in _UNCOUNTED:  # prim asks a tensor without values for its device
            return run_op(func, types, args, kwargs)
        place = func, self._counts[func]
        self._counts[func] += 1
        return self.run(place, types, args, kwargs)

    def run(self, place: Occurrence, types: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Recording(_Mode):
    """Tells a keeper of all operations."""

    def __enter__(self) -> Any:
        torch.clear_autocast_cache()  # of casts from before, which later runs do not have
        _THREADS.keepers.append(self.keeper)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _THREADS.keepers.pop()

    def run(self, place: Occurrence, types: Any, args: Any, kwargs: Any) -> Any:
        func = place[0]
        for x in written_by(func, args, kwargs):
            self.keeper.writes(x)
        out = run_op(func, types, args, kwargs)
        self.keeper.count += 1
        if not func._schema.is_mutable and not draws(func, args, kwargs):
            self.keeper.made(place, func, args, kwargs, out)
        return out


class Replaying(_Mode):
    """Operations whose results are kept do not run."""

    def run(self, place: Occurrence, types: Any, args: Any, kwargs: Any) -> Any:
        func, kept = place[0], self.keeper.kept.get(place)
        if kept is None:
            return run_op(func, types, args, kwargs)
        shapes = [x.shape for x in tensors_in(args, kwargs)]
        if kept.shapes != shapes:
            raise differs(f"{func} got shapes {list(map(tuple, shapes))}, before {list(map(tuple, kept.shapes))}")
        slots = iter(kept.slots)
        leaves = [self._value(next(slots), kept.written) if x is Tensor else x for x in kept.leaves]
        return tree_unflatten(leaves, kept.form)

    def _value(self, slot: int, copied: bool) -> Any:
        value = self._values[slot]
        if isinstance(value, Stashed):
            return value.get()
        return value.clone() if copied else value.detach()


def run_op(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation below a mode, out of sight of modes for functions, which see those of tensor subclasses again."""
    if not types:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def differs(what: str) -> RuntimeError:
    """The error of a later run that is not as the first."""
    text = f"a function in remat did not do the same in the backward pass: {what}"
    return RuntimeError(f"{text}; it must depend on its arguments only")


class _ThreadKeepers(threading.local):
    def __init__(self) -> None:
        self.keepers: list[Keeper] = []
        self.listeners: list[tuple[Callable[[Tensor, str], Any], Callable[[Tensor], Any]]] = []


_THREADS = _ThreadKeepers()


@contextlib.contextmanager
def listening(name: Callable[[Tensor, str], Any], moved: Callable[[Tensor], Any]) -> Iterator[None]:
    """A context in which functions are told of each value that gets a name, and of each that waits elsewhere."""
    _THREADS.listeners.append((name, moved))
    try:
        yield
    finally:
        _THREADS.listeners.pop()


def moved(values: Sequence[Tensor]) -> list[Any]:
    """Handles of values that wait on the host; those that do not stay as they are."""
    out = HOST.put(values) if values else []
    for x, handle in zip(values, out, strict=True):
        if isinstance(handle, Stashed) and _THREADS.listeners:
            _THREADS.listeners[-1][1](x)
    return list(out)


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """The same value, with a name by which a policy of `remat` can keep it.

    What is kept is the result of the operation that made the value, which then does not run again. In torch.compile
    names have no effect.

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
    checks.text("checkpoint_name", name)
    if not isinstance(x, Tensor):
        raise TypeError(f"checkpoint_name takes a tensor, got a {type(x).__name__}")
    return _Name.apply(x, name)  # type: ignore[no-untyped-call,no-any-return]


class _Name(torch.autograd.Function):
    """The identity; below all transforms it tells the record of the running region."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        for keeper in _THREADS.keepers[-1:]:
            keeper.named(x, name)
        for named, _ in _THREADS.listeners[-1:]:
            named(x, name)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept for the derivative."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, name: str) -> tuple[Tensor, Any]:
        return _Name.apply(x, name), in_dims[0]  # type: ignore[no-untyped-call]
