"""The modes of torch in which a region is recorded, and runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_unflatten

from ._kept import Keeper, Kept, Part, Place, Slot, Step, memory_of, written_by
from ._offload import Handle


def run_op(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation below a mode, out of sight of modes for functions, which see those of tensor subclasses again."""
    if not types:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


class Recording(TorchDispatchMode):
    """Tells a keeper of all operations."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper, self._counts = keeper, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor without values for its device
            return run_op(func, types, args, kwargs)
        if func._schema.is_mutable:
            for x in written_by(func, args, kwargs):
                self._keeper.writes(x)
        out = run_op(func, types, args, kwargs)
        place = func, self._counts[func]
        self._counts[func] += 1
        if func._schema.is_mutable:
            self._keeper.wrote(place, func, args, kwargs)
        else:
            self._keeper.made(place, _shapes(args), func, args, kwargs, out)
        return out


class Replaying(TorchDispatchMode):
    """Operations whose results are kept do not run, nor those whose results nobody uses.

    Args:
        kept: The former.
        values: The tensors in their results, or handles.
        idle: The latter; in place of their results are tensors full of NaN.
    """

    def __init__(
        self, kept: Mapping[Place, Kept], values: Sequence[Tensor | Handle | None], idle: Mapping[Place, Step]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._values, self._idle, self._counts = kept, values, idle, Counter[Any]()
        self._unknown: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = func, self._counts[func]
        self._counts[func] += 1
        kept, idle = self._kept.get(place), self._idle.get(place)
        expected = kept or idle
        if expected is None:
            return run_op(func, types, args, kwargs or {})
        if expected.shapes != _shapes(args):
            raise RuntimeError(
                f"a function in remat did not do the same in the backward pass: {func} got shapes {list(map(tuple, _shapes(args)))}, "
                f"before {list(map(tuple, expected.shapes))}; it must depend on its arguments only"
            )
        if kept is None:
            assert idle is not None
            found = [_unknown(part) for part in idle.parts]
            self._unknown += [StorageWeakRef(x.untyped_storage()) for x in found]
            return tree_unflatten(found, idle.form)
        return tree_unflatten(
            [self._value(x, kept.written) if isinstance(x, Slot) else x for x in kept.leaves], kept.form
        )

    def finish(self, results: Sequence[Tensor]) -> bool:
        """The run has ended: whether nobody but its results holds what is not known."""
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._unknown if not ref.expired()]  # type: ignore[attr-defined]
        return not any(is_held(storage, results) for storage in alive)

    def _value(self, slot: Slot, copied: bool) -> Tensor:
        value = self._values[slot.number]
        if isinstance(value, Handle):
            return value.get()
        assert value is not None
        return value.clone() if copied else value.detach()


def is_held(storage: torch.UntypedStorage, by: Sequence[Tensor]) -> bool:
    """Whether anything but these tensors has a memory."""
    own = {id(y) for x in by for y in (x, x._base) if y is not None and memory_of(y) == storage._cdata}
    return bool(torch._C._storage_Use_Count(storage._cdata) > 1 + len(own))  # type: ignore[attr-defined]


def _unknown(part: Part) -> Tensor:
    x = torch.empty_strided(part.size, part.stride, dtype=part.dtype, device=part.device)
    return x.fill_(torch.nan) if x.is_floating_point() or x.is_complex() else x.zero_()


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in args if isinstance(x, Tensor))
