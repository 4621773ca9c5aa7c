"""The tensors from which later runs start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..surroundings._captured import note_moves, within
from ..values._memory import memory_of
from ..values._store import Handle, Store
from ._kept import note_moved
from ._record import Record


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
