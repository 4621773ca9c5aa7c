"""The modes of torch in which a region is recorded, and runs again."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_unflatten

from ..surroundings._surroundings import OfOneRun
from ..values._aten import written_by
from ..values._store import Handle
from ._kept import Keeper, Kept, Place, Slot


class _Threads(threading.local):
    def __init__(self) -> None:
        self.uncounted = 0


_THREADS = _Threads()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """A context for operations that are not those of the function that runs."""
    _THREADS.uncounted += 1
    try:
        yield
    finally:
        _THREADS.uncounted -= 1


def run_op(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation below a mode, out of sight of modes for functions, which see those of tensor subclasses again."""
    if not types:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


class Recording(TorchDispatchMode, OfOneRun):
    """Tells a keeper of all operations."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper, self._counts = keeper, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or _THREADS.uncounted:  # it asks a tensor without values for its device
            return run_op(func, types, args, kwargs)
        if func._schema.is_mutable:
            for x in written_by(func, args, kwargs):
                self._keeper.writes(x)
        out = run_op(func, types, args, kwargs)
        place = func, self._counts[func]
        self._counts[func] += 1
        if func._schema.is_mutable:
            self._keeper.count += 1
        else:
            self._keeper.made(place, _shapes(args), func, args, kwargs, out)
        return out


class Replaying(TorchDispatchMode, OfOneRun):
    """Operations whose results are kept do not run.

    Args:
        kept: Those operations.
        values: The tensors in their results, or handles.
    """

    def __init__(self, kept: Mapping[Place, Kept], values: Sequence[Tensor | Handle | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._values, self._counts = kept, values, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or _THREADS.uncounted:
            return run_op(func, types, args, kwargs or {})
        place = func, self._counts[func]
        self._counts[func] += 1
        kept = self._kept.get(place)
        if kept is None:
            return run_op(func, types, args, kwargs or {})
        if kept.shapes != _shapes(args):
            raise RuntimeError(
                f"a function in remat did not do the same in the backward pass: {func} got shapes {list(map(tuple, _shapes(args)))}, "
                f"before {list(map(tuple, kept.shapes))}; it must depend on its arguments only"
            )
        return tree_unflatten(
            [self._value(x, kept.written) if isinstance(x, Slot) else x for x in kept.leaves], kept.form
        )

    def _value(self, slot: Slot, copied: bool) -> Tensor:
        value = self._values[slot.number]
        if isinstance(value, Handle):
            return value.get()
        assert value is not None
        return value.clone() if copied else value.detach()


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in args if isinstance(x, Tensor))
