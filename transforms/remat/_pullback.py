"""Derivatives of a function that runs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_differentiable(x: Tensor) -> bool:
    """Whether a tensor has a dtype that derivatives have."""
    return x.is_floating_point() or x.is_complex()


def with_values(tensors: Sequence[Tensor], places: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
    """A list of tensors with others in some places."""
    new = list(tensors)
    for i, value in zip(places, values, strict=True):
        new[i] = value
    return new


def with_graph(
    of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], functional: bool
) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor]], Sequence[Tensor | None]]]:
    """The results of a function and its pullback, from the gradients of the results to those of the inputs.

    Args:
        of: The function.
        inputs: Its arguments.
        functional: Whether torch.func makes the graph, as for calls under its transforms. In one of plain autograd
            everything works that works there.
    """
    if functional or torch._C._are_functorch_transforms_active():
        made: Any = torch.func.vjp(of, *inputs)
        out, vjp = made
        return out, lambda grads: vjp(tuple(grads))
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        starts = [x.view_as(x) if higher and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        results = of(*starts)

    def pullback(grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        ends = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        if not ends:
            return [None] * len(starts)
        outs, given = zip(*ends, strict=True)
        return torch.autograd.grad(outs, starts, given, create_graph=higher, allow_unused=True)

    return results, pullback


def run_with_graph(
    of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], functional: bool
) -> tuple[Tensor, ...]:
    """The results of a function that runs as in `with_graph`; the graph is gone then. They may be of any dtype."""
    if not functional:
        return tuple(x.detach() for x in with_graph(of, inputs, False)[0])
    nothing = torch.zeros(())  # vjp takes at least one input
    made: Any = torch.func.vjp(lambda _, *values: (nothing, of(*values)), nothing, *inputs, has_aux=True)
    return tuple(made[2])
