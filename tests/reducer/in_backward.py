"""Something that happens amid a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.action()
        return grad, None


def in_backward(x: Tensor, action: Callable[[], None]) -> Tensor:
    """x, as it is; `action` is called when its gradient has come."""
    out: Tensor = _InBackward.apply(x, action)
    return out
