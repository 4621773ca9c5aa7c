"""A backward pass in a thread of autograd's own, as on a device, for tensors on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Autograd runs a backward pass that is nested deeper than this in a thread of its own.
_DEPTH = 70


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, run: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.run = depth, run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                nested(ctx.run, ctx.depth - 1)
        else:
            ctx.run()
        return grad, None, None


def nested(run: Callable[[], None], depth: int = _DEPTH) -> None:
    """Call a function within so many backward passes."""
    _Nested.apply(torch.ones((), requires_grad=True), depth, run).backward()


def in_engine_thread(run: Callable[[], Any]) -> Any:
    """The result of a function that runs in a thread of autograd's."""
    out: list[Any] = []
    here = threading.get_ident()

    def inside() -> None:
        assert threading.get_ident() != here
        with torch.enable_grad():
            out.append(run())

    nested(inside)
    return out[0]
