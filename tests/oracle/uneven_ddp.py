"""The correct result of data-parallel training on uneven inputs: one process of plain torch. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def train(
    model: torch.nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], batches: Sequence[Sequence[Any]],
    loss: Callable[[torch.nn.Module, Any], torch.Tensor], *, by_world: bool = True, window: int = 1,
    of_window: bool = False, epochs: int = 1, before_step: Callable[[torch.nn.Module], Any] | None = None,
) -> tuple[list[torch.Tensor], list[Any]]:  # fmt: skip
    """Train on the batches of all ranks together.

    Args:
        batches: For each rank its batches. Iteration i has the i-th batch of every rank that has one.
        by_world: Whether to divide the sum of the ranks' gradients by their number; otherwise by that of ranks with input.
        window: Iterations whose gradients are added up for one step; a rank that ends within a window
            contributes the gradients that it has.
        of_window: Whether "with input" means in any iteration of the window; otherwise in its last one.

    Returns:
        Parameters, and the optimizer's state of each, in order.
    """
    optimizer = make_optimizer(model.parameters())
    for _ in range(epochs):
        for first in range(0, max(map(len, batches)), window):
            here = range(first, first + window)
            last = [i for i in here if any(i < len(own) for own in batches)]
            if len(last) < window:
                break  # a window that no rank completes is not stepped
            optimizer.zero_grad()
            live = sum(last[0 if of_window else -1] < len(own) for own in batches)
            for own in batches:
                for i in here:
                    if i < len(own):
                        (loss(model, own[i]) / (len(batches) if by_world else live)).backward()
            if before_step is not None:
                before_step(model)
            optimizer.step()
    state = [
        {k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items() if v is not None}
        for p in model.parameters()
    ]
    return [p.detach().clone() for p in model.parameters()], state
