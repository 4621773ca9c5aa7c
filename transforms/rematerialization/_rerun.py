"""The record of a first run, which later runs restore."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor

from ._captured import note_moves, within
from ._keeper import Keeper, memory_of, note_moved
from ._modes import RandomNumbers, Recording, Replaying, Surroundings, function_modes, uncounted
from ._offload import Handle, Store
from ._places import Changed, Places


class Record:
    """Random numbers, autocast, modes, buffers that the function writes into, and places in which it leaves something.

    Attributes:
        keeper: Keeps results of operations; None where nothing is kept.
        stand_ins: In a later run: id of a buffer -> what the function gets in its place.
        result: The form of the function's result.
    """

    def __init__(
        self, preserve_rng_state: bool, places: Places, keeper: Keeper | None = None, uncached: bool = False
    ) -> None:
        self.keeper = keeper
        self.values: list[Any] | None = None  # what the keeper has kept, where the graph holds it
        self.result: Any = None
        self.stand_ins: dict[int, Tensor] = {}  # in a later run: id of a buffer -> what the function gets instead
        self.surroundings = Surroundings()
        self._preserve_rng, self._uncached = preserve_rng_state, uncached
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


class SavedTensors:
    """The arguments of a call, and what a policy keeps of its first run.

    Args:
        tensors: The arguments.
        outside: The memory of tensors that exist without the function.
        record: What the first run leaves for later runs.
        store: Where those arguments wait that are results of other operations; None where the graph holds them.
    """

    def __init__(
        self, tensors: Sequence[Tensor], outside: Collection[int], record: Record, store: Store | None
    ) -> None:
        self._record, self._count = record, len(tensors)
        self._saver: Any = None  # the result of a node that saves the arguments, and what a policy keeps
        self._handles: dict[int, Handle] = {}  # arguments that wait elsewhere
        moving = [i for i, x in enumerate(tensors) if _is_activation(x) and memory_of(x) not in outside]
        if store is not None and moving:
            note_moves()
            waits = store.put([tensors[i].detach() for i in moving])
            self._handles = {i: one for i, one in zip(moving, waits, strict=True) if isinstance(one, Handle)}
        for i, handle in self._handles.items():
            note_moved(tensors[i], handle)
            handle.settle()
        left = [x for i, x in enumerate(tensors) if i not in self._handles]
        keeper = record.keeper
        self._kept = [] if keeper is None else keeper.values
        kept = [x for x in self._kept if isinstance(x, Tensor)]
        self._kept = [None if isinstance(x, Tensor) else x for x in self._kept]
        self._tensors = [i for i in range(len(tensors)) if i not in self._handles]
        self._values_kept = [i for i, x in enumerate(keeper.values) if isinstance(x, Tensor)] if keeper else []
        if keeper is not None:
            keeper.values = []
        if left or kept:
            with torch.enable_grad(), within([]):
                anchor = torch.empty(0, requires_grad=True)
                # The node alone would not keep what it has saved, before torch 2.13.
                self._saver = _Save.apply(anchor, *(x.detach() for x in (*left, *kept)))  # type: ignore[no-untyped-call]

    def load(self) -> list[Tensor]:
        """The arguments; what is kept goes to the record."""
        saved = [] if self._saver is None else list(self._saver.grad_fn.saved_tensors)
        tensors: list[Any] = [None] * self._count
        for i, x in zip(self._tensors, saved, strict=False):
            tensors[i] = x
        for i, handle in self._handles.items():
            tensors[i] = handle.get()
        values = list(self._kept)
        for i, x in zip(self._values_kept, saved[len(self._tensors) :], strict=True):
            values[i] = x
        self._record.values = values
        return tensors


class _Save(torch.autograd.Function):
    """Saves tensors as any operation does, so that hooks on saved tensors see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("nothing depends on it")


def _is_activation(x: Tensor) -> bool:
    """Whether a tensor is the result of an operation that a derivative goes through, and no view of a parameter."""
    floats = x.is_floating_point() or x.is_complex()
    return floats and x.grad_fn is not None and not (x._is_view() and x._base is not None and x._base.is_leaf)
