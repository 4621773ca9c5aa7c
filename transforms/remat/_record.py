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
from ._tail import Tail


class Record:
    """The state of the random number generators, autocast, and buffers that the function writes into.

    Attributes:
        keeper: Keeps results of operations; None where nothing is kept.
        stand_ins: In a later run: id of a buffer -> what the function gets in its place.
        result: The structure of the function's result, and the place of each tensor in it.
    """

    def __init__(self, preserve_rng: bool, keeper: Keeper | None = None) -> None:
        self.keeper = keeper
        self.values: list[Any] | None = None  # what the keeper has kept, where the graph holds it
        self._preserve_rng = preserve_rng
        self.result: tuple[Any, list[tuple[str, int]]] = (None, [])
        self._before: dict[int, Tensor] = {}  # id of a buffer -> its values before the first run
        self._again = False
        self.stand_ins: dict[int, Tensor] = {}  # in a later run: id of a buffer -> what the function gets instead
        self._cpu: Tensor | None = None
        self._devices: list[tuple[torch.device, Tensor]] = []
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    @contextlib.contextmanager
    def first(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A context for the first run."""
        self._before = {}
        devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *sorted({device.type for device in devices}))
        ]
        if self._preserve_rng:
            self._cpu = torch.get_rng_state()
            self._devices = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]
        with contextlib.ExitStack() as stack:
            stack.enter_context(uncached_autocast())
            if self.keeper is not None:
                stack.enter_context(self.keeper.recording())
                stack.enter_context(Recording(self.keeper))
            yield
        if self.keeper is not None:
            self.keeper.finish()

    @contextlib.contextmanager
    def again(self, whole: bool) -> Iterator[Tail | Replaying | None]:
        """A context for a later run.

        Args:
            whole: Whether more than first derivatives by the arguments may be asked for.

        Yields:
            The mode that leaves operations out, if any; its `finish` is to be called with the results.
        """
        outer = self._again, self.stand_ins
        self._again, self.stand_ins = True, {i: x.clone() for i, x in self._before.items()}
        try:
            with contextlib.ExitStack() as stack:
                for kind, enabled, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                if self._cpu is not None:
                    stack.enter_context(torch.random.fork_rng([d for d, _ in self._devices]))
                    torch.set_rng_state(self._cpu)
                    for device, state in self._devices:
                        torch.get_device_module(device).set_rng_state(state, device)
                mode: Tail | Replaying | None = None
                if self.keeper is None:
                    mode = None if whole else stack.enter_context(Tail())
                elif not forward_mode():
                    values: Any = self.keeper.values if self.values is None else self.values
                    idle = {} if whole else self.keeper.idle
                    mode = stack.enter_context(Replaying(self.keeper.kept, values, idle))
                yield mode
        finally:
            self._again, self.stand_ins = outer

    def before(self, buffer: Tensor) -> Tensor:
        """Called before the function writes into a buffer: the buffer itself in the first run, later a stand-in."""
        if self._again:
            return self.stand_ins.setdefault(id(buffer), buffer.detach().clone())
        with torch.no_grad():
            self._before[id(buffer)] = buffer.detach().clone()
        return buffer


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
