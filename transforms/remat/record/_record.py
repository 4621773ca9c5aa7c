"""What the first run of a function leaves for later runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor

from ..surroundings._places import Changed, Places
from ..surroundings._random import RandomNumbers
from ..surroundings._surroundings import Surroundings, function_modes
from ._kept import Keeper
from ._modes import Recording, Replaying, uncounted


class Record:
    """Random numbers, autocast, modes, buffers that the function writes into, and places in which it leaves something.

    Attributes:
        keeper: Keeps results of operations; None where nothing is kept.
        stand_ins: In a later run: id of a buffer -> what the function gets in its place.
        result: The form of the function's result.
    """

    def __init__(
        self, preserve_rng: bool, places: Places, keeper: Keeper | None = None, uncached: bool = False
    ) -> None:
        self.keeper = keeper
        self.values: list[Any] | None = None  # what the keeper has kept, where the graph holds it
        self.result: Any = None
        self.stand_ins: dict[int, Tensor] = {}  # in a later run: id of a buffer -> what the function gets instead
        self.surroundings = Surroundings()
        self._preserve_rng, self._uncached = preserve_rng, uncached
        self._written: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a buffer, and its values before the first run
        self._places = places
        self._before: list[Any] = []  # of the places, while the function runs for the first time
        self._changed = Changed()
        self._again = False
        self._random: RandomNumbers | None = None
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    @contextlib.contextmanager
    def first(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A context for the first run."""
        self._written, self._before = {}, self._places.read()
        devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *sorted({device.type for device in devices}))
        ]
        if self._preserve_rng:
            self._random = RandomNumbers(devices)
        with contextlib.ExitStack() as stack:
            if self._uncached:
                stack.enter_context(uncached_autocast())
            if self.keeper is not None:
                torch.clear_autocast_cache()  # of casts from before, which later runs do not have
                self.keeper.clear()
            yield
        self._changed, self._before = self._places.changes(self._before), []
        if self._random is not None:
            self._random.settle()

    def undo(self) -> None:
        """Go back to before the first run, which has not ended."""
        if self._random is not None:
            self._random.set()
        with torch.no_grad():
            for buffer, before in self._written.values():
                buffer.copy_(before)
        if self._before:
            self._places.write(self._before)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context for a later run, after which all places and generators are as before it."""
        outer = self._again, self.stand_ins
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=not self._uncached)
                )
            torch.clear_autocast_cache()
            if self._random is not None:
                stack.enter_context(self._random.again())
            stack.enter_context(self._places.unchanged())
            if self._before:  # the first run has not ended, and asks for a gradient
                self._places.write(self._before)
            else:
                self._changed.undo()
            with uncounted():
                stand_ins = {i: _copy(before, buffer) for i, (buffer, before) in self._written.items()}
            self._again, self.stand_ins = True, stand_ins
            try:
                yield
            finally:
                self._again, self.stand_ins = outer

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, mode: Any) -> Any:
        """Call the function in one of these contexts, below the modes of the first run and a mode of this one.

        No operations but the function's own are seen by modes, and count.
        """
        keeper = self.keeper
        with contextlib.ExitStack() as stack:
            if not self._again:
                stack.enter_context(function_modes(self.surroundings.functions))
                stack.enter_context(mode)
                if keeper is not None:
                    stack.enter_context(keeper.recording())
                    stack.enter_context(Recording(keeper))
                return fn(*args, **kwargs)
            stack.enter_context(self.surroundings.again())
            stack.enter_context(mode)
            if keeper is not None and not forward_mode():
                values: Any = keeper.values if self.values is None else self.values
                stack.enter_context(Replaying(keeper.kept, values))
            return self.surroundings.call(fn, args, kwargs)

    def before(self, buffer: Tensor) -> Tensor:
        """Called before the function writes into a buffer: the buffer itself in the first run, later a stand-in."""
        with uncounted():
            if self._again:
                if id(buffer) not in self.stand_ins:
                    self.stand_ins[id(buffer)] = _copy(buffer, buffer)
                return self.stand_ins[id(buffer)]
            self._written[id(buffer)] = buffer, _copy(buffer, None)
            return buffer


def _copy(values: Tensor, like: Tensor | None) -> Tensor:
    with torch.no_grad():
        new = values.detach().clone()
        return new.requires_grad_() if like is not None and like.requires_grad else new


def forward_mode() -> bool:
    """Whether a forward-mode derivative is active: it mixes operations on tangents with those of the function."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


@contextlib.contextmanager
def uncached_autocast() -> Iterator[None]:
    """A context in which autocast keeps no casts: those made without a graph must not be used with one."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
