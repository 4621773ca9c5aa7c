"""Arguments that wait elsewhere between the forward and the backward pass.

Two identities do it, so that derivatives and batches go through: one gives the argument away and leaves a tensor of its
shape without memory, which the graph keeps; the other gets it back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._kept import note_label, note_moved
from ._offload import Handle, Store


class Shelf:
    """The place of one argument."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._value: Tensor | None = None  # during the first run
        self._waits: Tensor | Handle | None = None

    def put(self, x: Tensor) -> None:
        self._value = x
        (self._waits,) = self._store.put([x])
        if isinstance(self._waits, Handle):
            note_moved(x, self._waits)

    def settle(self) -> None:
        """The first run has ended."""
        self._value = None
        if isinstance(self._waits, Handle):
            self._waits.settle()

    def get(self) -> Tensor:
        if self._value is not None:
            return self._value.detach()
        assert self._waits is not None
        return self._waits.get() if isinstance(self._waits, Handle) else self._waits.detach()


def give(shelf: Shelf, x: Tensor) -> Tensor:
    """Put a tensor there; what it leaves has its shape and its derivatives."""
    return _Give.apply(shelf, x)  # type: ignore[no-untyped-call,no-any-return]


def take(shelf: Shelf, left: Tensor) -> Tensor:
    """Get it back, for what it has left."""
    return _Take.apply(shelf, left)  # type: ignore[no-untyped-call,no-any-return]


class _Identity(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


class _Give(_Identity):
    @staticmethod
    def forward(shelf: Shelf, x: Tensor) -> Tensor:
        shelf.put(x.detach())
        left = torch.empty_strided(x.shape, (0,) * x.ndim, dtype=x.dtype, device=x.device)
        note_label(left, "in place of an argument that waits elsewhere")
        return left

    @staticmethod
    def vmap(info: Any, in_dims: Any, shelf: Shelf, x: Tensor) -> tuple[Tensor, Any]:
        return give(shelf, x), in_dims[1]


class _Take(_Identity):
    @staticmethod
    def forward(shelf: Shelf, left: Tensor) -> Tensor:
        found = shelf.get()
        if found.shape != left.shape:
            raise RuntimeError(
                f"remat: an argument of shape {tuple(found.shape)} waits elsewhere, and what it left has shape {tuple(left.shape)}"
            )
        return found

    @staticmethod
    def vmap(info: Any, in_dims: Any, shelf: Shelf, left: Tensor) -> tuple[Tensor, Any]:
        return take(shelf, left), in_dims[1]
