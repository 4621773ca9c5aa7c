"""What the first run of a function leaves for later runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor

from ._kept import Keeper
from ._modes import Recording, Replaying


class Record:
    """The state of the random number generators, autocast, and buffers that the function writes into.

    Attributes:
        keeper: Keeps results of operations; None where nothing is kept.
        stand_ins: In a later run: id of a buffer -> what the function gets in its place.
        result: The structure of the function's result, and the place of each tensor in it.
    """

    def __init__(self, preserve_rng: bool, keeper: Keeper | None = None, uncached: bool = False) -> None:
        self.keeper = keeper
        self.values: list[Any] | None = None  # what the keeper has kept, where the graph holds it
        self._preserve_rng, self._uncached = preserve_rng, uncached
        self.result: tuple[Any, list[tuple[str, int]]] = (None, [])
        self._written: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a buffer, and its values before the first run
        self._again = False
        self.stand_ins: dict[int, Tensor] = {}  # in a later run: id of a buffer -> what the function gets instead
        self._cpu: Tensor | None = None
        self._devices: list[tuple[torch.device, Tensor]] = []
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    @contextlib.contextmanager
    def first(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A context for the first run."""
        self._written = {}
        devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *sorted({device.type for device in devices}))
        ]
        if self._preserve_rng:
            self._cpu = torch.get_rng_state()
            self._devices = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]
        with contextlib.ExitStack() as stack:
            if self._uncached:
                stack.enter_context(uncached_autocast())
            if self.keeper is not None:
                torch.clear_autocast_cache()  # of casts from before, which later runs do not have
                stack.enter_context(self.keeper.recording())
                stack.enter_context(Recording(self.keeper))
            yield

    def undo(self) -> None:
        """Go back to before the first run."""
        if self._cpu is not None:
            torch.set_rng_state(self._cpu)
            for device, state in self._devices:
                torch.get_device_module(device).set_rng_state(state, device)
        with torch.no_grad():
            for buffer, before in self._written.values():
                buffer.copy_(before)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context for a later run."""
        outer = self._again, self.stand_ins
        self._again, self.stand_ins = True, {i: _copy(before, buffer) for i, (buffer, before) in self._written.items()}
        try:
            with contextlib.ExitStack() as stack:
                for kind, enabled, dtype in self._autocast:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=not self._uncached)
                    )
                torch.clear_autocast_cache()
                if self._cpu is not None:
                    stack.enter_context(torch.random.fork_rng([d for d, _ in self._devices]))
                    torch.set_rng_state(self._cpu)
                    for device, state in self._devices:
                        torch.get_device_module(device).set_rng_state(state, device)
                if self.keeper is not None and not forward_mode():
                    values: Any = self.keeper.values if self.values is None else self.values
                    stack.enter_context(Replaying(self.keeper.kept, values))
                yield
        finally:
            self._again, self.stand_ins = outer

    def before(self, buffer: Tensor) -> Tensor:
        """Called before the function writes into a buffer: the buffer itself in the first run, later a stand-in."""
        if self._again:
            return self.stand_ins.setdefault(id(buffer), _copy(buffer, buffer))
        if self.keeper is not None:
            self.keeper.paused = True
        self._written[id(buffer)] = buffer, _copy(buffer, None)
        if self.keeper is not None:
            self.keeper.paused = False
        return buffer


def _copy(values: Tensor, like: Tensor | None) -> Tensor:
    with torch.no_grad():
        return values.detach().clone().requires_grad_(like is not None and like.requires_grad)


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
