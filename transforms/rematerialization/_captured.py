"""The tensors of a running function: replaced by others, watched for writes, and looked at for those that no search has found."""

from __future__ import annotations

import contextlib
import re
import threading
import types
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ._keeper import memory_of, written_by
from ._modes import OfOneRun


class Captured(Exception):
    """A function has used tensors that are tracked and that no search had found."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self.found = found


_MOVES: Any = cast(Any, torch.Tensor).requires_grad.__get__

# Functions of torch that write into some of their arguments without a trailing underscore: their positions, and names.
_STATISTICS = ("running_mean", "running_var")
_LENDS = ("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage")
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_INPLACE = re.compile(r"(_foreach_\w*[^_]_|(?!_)\w*[^_]_|__i\w+__)$").match


class Substitute(TorchFunctionMode, OfOneRun):
    """Replaces tensors by others in every operation of torch.

    Args:
        of: id -> replacement.
        state: Memory -> tensor that an operation may write into, itself or a view of it.
        written: Called with a tensor of `state` before the first operation that writes into it; returns what the
            operation gets instead.
        own: The ids of tensors that may be tracked; None where no others are looked for.
        refuse: Called with the memory of other tensors before an operation writes into them.
        moves: id -> whether a tensor of the region requires a gradient without `remat`.
        levels: Those of the transforms around the region: tensors of others are the function's own.
    """

    def __init__(
        self,
        of: dict[int, Tensor],
        state: dict[int, Tensor],
        written: Callable[[Tensor], Tensor],
        own: set[int] | None,
        refuse: Callable[[int], None] = lambda memory: None,
        moves: Mapping[int, bool] = types.MappingProxyType({}),
        levels: Container[int] = (),
    ) -> None:
        super().__init__()
        self.of, self._state, self._written, self._own, self._refuse = of, state, written, own, refuse
        self._moves, self._levels = moves, levels
        self.foreign: dict[int, Tensor] = {}
        self.moves = False  # whether a region inside has moved arguments elsewhere

    def __enter__(self) -> Substitute:
        _THREADS.running.append(self)
        return cast(Substitute, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _THREADS.running.pop()

    @contextlib.contextmanager
    def around(self, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
        """A context for a region inside this one, with what its tensors are here; what it does itself is not watched."""
        new = [self._swap(x) for x in tensors]
        own, self._own = self._own, None
        try:
            yield new
        finally:
            self._own = own

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _MOVES and id(x := self._swap(args[0])) in self._moves:
            return self._moves[id(x)]
        lends = getattr(func, "__name__", "") in _LENDS
        for x in _targets(func, args, kwargs):
            memory = memory_of(x)
            if memory in self._state:
                old = self._state.pop(memory)
                self.of[id(old)] = self._written(old)
            elif not lends:  # most only read
                self._refuse(memory)
        args = tuple(map(self._swap, args))
        if kwargs:
            kwargs = {name: self._swap(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _swap(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            new = self.of.get(id(x))
            if new is not None:
                return new
            if self._own is not None and id(x) not in self._own and self._is_foreign(x):
                self.foreign[id(x)] = x
        elif type(x) in (list, tuple):
            return type(x)(map(self._swap, x))
        elif isinstance(x, torch.Generator):
            raise TypeError(
                "a function in remat draws from a torch.Generator, which would go on from another state when the function "
                "runs again; draw outside of it and pass the numbers, or use torch's default generator"
            )
        return x

    def _is_foreign(self, x: Tensor) -> bool:
        """Whether a tensor is a leaf, or belongs to a transform that is not active here."""
        level = torch._C._functorch.maybe_get_level(x)
        if level > 0:
            active = {one.level() for one in torch._C._functorch.get_interpreter_stack() or ()}
            return level in self._levels and level not in active
        ended = torch._C._functorch.is_functorch_wrapped_tensor(x)  # of a transform that the function has used itself
        return not ended and x.requires_grad and x.is_leaf


class _Threads(threading.local):
    def __init__(self) -> None:
        self.running: list[Substitute] = []


_THREADS = _Threads()


def as_seen(x: Tensor) -> Tensor:
    """What a tensor is in the region around this one."""
    return _THREADS.running[-1].of.get(id(x), x) if _THREADS.running else x


def note_moves() -> None:
    """Note in all regions around this one that it moves arguments that are results of operations."""
    for mode in _THREADS.running:
        mode.moves = True


@contextlib.contextmanager
def within(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """A context for a region's tensors, as the region around it has them."""
    if _THREADS.running:
        with _THREADS.running[-1].around(tensors) as new:
            yield new
    else:
        yield tensors


def _targets(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a function of torch writes into, or may give to others to write into."""
    name = getattr(func, "__name__", "")
    found: list[Any] = []
    if hasattr(func, "_schema"):
        found = written_by(func, args, kwargs) if func._schema.is_mutable else []
    elif name in ("batch_norm", "instance_norm"):
        found = [*args[1:3], *(kwargs.get(n) for n in _STATISTICS)]
    elif name in _LENDS or func == _SET_DATA:
        found = [*args, *kwargs.values()][:1]
    elif kwargs.get("out") is not None:
        found = [kwargs["out"]]
    elif name == "__setitem__" or kwargs.get("inplace") is True or _INPLACE(name) and name != "requires_grad_":
        found = [*args, *kwargs.values()][:1]
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]
