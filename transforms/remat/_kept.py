"""The results of operations that a region keeps, below all transforms."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ._policies import Keep, Policy, keep_of, keep_of_name

# Which occurrence of an operation: other operations between may differ between two runs.
Place = tuple[Any, int]


class Kept(NamedTuple):
    """The result of an operation."""

    shapes: tuple[torch.Size, ...]  # of its arguments, to be compared
    form: Any  # the structure of the result
    leaves: list[Any]  # its tensors as `Slot`s, other values as they are
    written: bool = False  # whether a later operation writes into it


class Slot(NamedTuple):
    """The place of a tensor among those kept."""

    number: int


class Origin(NamedTuple):
    """The operation that made some memory."""

    place: Place
    shapes: tuple[torch.Size, ...]
    form: Any
    parts: list[Any]  # (memory, geometry) of each tensor of its result, other values as they are


class Keeper:
    """Records a run's results that a policy keeps, and gives them to later runs."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.kept: dict[Place, Kept] = {}
        self.tensors: list[Tensor] = []
        self._memory: dict[int, list[int]] = {}  # storage -> numbers of the tensors in it
        self._origins: dict[int, Origin] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which results are kept."""
        self.kept, self.tensors, self._memory, self._origins = {}, [], {}, {}
        with _Recording(self), _running(self):
            yield
        self._memory, self._origins = {}, {}

    def replaying(self, tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """A context in which operations whose results are kept do not run.

        Args:
            tensors: Those of `self.tensors`.
        """
        return _Replaying(self.kept, tensors)

    # -- of the recording mode ------------------------------------------------------------------

    def made(self, place: Place, shapes: tuple[torch.Size, ...], op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep the result of an operation if the policy says so; remember where its memory comes from."""
        draws = _draws(op, args, kwargs)
        leaves, form = tree_flatten(out)
        if not draws and keep_of(self._policy, op, *args, **kwargs) is not Keep.RECOMPUTE:
            self._keep(place, shapes, form, leaves)
            return
        given = {_key(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        parts = [(StorageWeakRef(x.untyped_storage()), _geometry(x)) if isinstance(x, Tensor) else x for x in leaves]
        if not draws:
            for x in leaves:
                if isinstance(x, Tensor) and _key(x) not in given:
                    self._origins[_key(x)] = Origin(place, shapes, form, parts)

    def _keep(self, place: Place, shapes: Any, form: Any, leaves: list[Any]) -> None:
        slots: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                self._memory.setdefault(_key(x), []).append(len(self.tensors))
                slots.append(Slot(len(self.tensors)))
                self.tensors.append(x.detach())
            else:
                slots.append(x)
        self.kept[place] = Kept(shapes, form, slots)

    def named(self, x: Tensor, name: str) -> None:
        """Keep the result of the operation that made a value, if the policy keeps values of this name."""
        keeps, origin = keep_of_name(self._policy, name) is not Keep.RECOMPUTE, self._origins.get(_key(x))
        if not keeps or origin is None or origin.place in self.kept:
            return
        leaves = []
        for part in origin.parts:
            if isinstance(part, tuple) and isinstance(part[0], StorageWeakRef):
                memory, geometry = part
                if memory.expired():
                    return
                leaves.append(_rebuilt(memory, geometry, x.device))
            else:
                leaves.append(part)
        self._keep(origin.place, origin.shapes, origin.form, leaves)

    def writes(self, x: Tensor) -> None:
        """Called before an operation writes into a tensor: what is kept of its memory is copied first."""
        key = _key(x)
        self._origins.pop(key, None)
        numbers = set(self._memory.pop(key, ()))
        if not numbers:
            return
        for n in numbers:
            self.tensors[n] = self.tensors[n].clone()
        for place, kept in self.kept.items():
            if any(isinstance(leaf, Slot) and leaf.number in numbers for leaf in kept.leaves):
                self.kept[place] = kept._replace(written=True)


class _Recording(TorchDispatchMode):
    def __init__(self, keeper: Keeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper, self._counts = keeper, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for x in _written(func, args, kwargs):
                self._keeper.writes(x)
        out = func(*args, **kwargs)
        place = func, self._counts[func]
        self._counts[func] += 1
        if not func._schema.is_mutable:
            self._keeper.made(place, _shapes(args), func, args, kwargs, out)
        return out


class _Replaying(TorchDispatchMode):
    def __init__(self, kept: dict[Place, Kept], tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._tensors, self._counts = kept, tensors, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self._kept.get((func, self._counts[func]))
        self._counts[func] += 1
        if kept is None:
            return func(*args, **(kwargs or {}))
        if kept.shapes != _shapes(args):
            raise RuntimeError(
                f"a function in remat did not do the same in the backward pass: {func} got shapes {list(map(tuple, _shapes(args)))}, "
                f"before {list(map(tuple, kept.shapes))}; it must depend on its arguments only"
            )
        leaves = [
            (self._tensors[x.number].clone() if kept.written else self._tensors[x.number].detach())
            if isinstance(x, Slot)
            else x
            for x in kept.leaves
        ]
        return tree_unflatten(leaves, kept.form)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.keeper: Keeper | None = None


_THREADS = _Threads()


@contextlib.contextmanager
def _running(keeper: Keeper | None) -> Iterator[None]:
    outer, _THREADS.keeper = _THREADS.keeper, keeper
    try:
        yield
    finally:
        _THREADS.keeper = outer


def note_name(x: Tensor, name: str) -> None:
    """Tell the region that is being recorded the name of a value."""
    if _THREADS.keeper is not None:
        _THREADS.keeper.named(x, name)


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _geometry(x: Tensor) -> Any:
    return x.dtype, x.storage_offset(), x.size(), x.stride()


def _rebuilt(memory: StorageWeakRef, geometry: Any, device: torch.device) -> Tensor:
    dtype, offset, size, stride = geometry
    storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in args if isinstance(x, Tensor))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    return found


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: it always runs again, so that later ones draw theirs."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":  # attention draws only with dropout
            return bool(args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True
