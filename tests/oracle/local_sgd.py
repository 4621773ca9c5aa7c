"""Local SGD and its relatives in plain torch, in one process that holds all ranks; written from the papers.

Each function takes `grad(rank, step, params) -> gradient or None`, with parameters as one float64 vector; None is a rank
without input in this step. `weight(rank, step)` is the weight of a rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Grad = Callable[[int, int, Tensor], "Tensor | None"]


def inner_steps(
    make: Callable[[Any], torch.optim.Optimizer], start: Tensor, ranks: int
) -> tuple[list[Tensor], Any, Any]:
    """The parameters and the optimizer of each rank, and a function that steps one of them."""
    params = [start.clone().requires_grad_() for _ in range(ranks)]
    optimizers = [make([p]) for p in params]

    def step(rank: int, grad: Tensor | None) -> None:
        if grad is not None:
            params[rank].grad = grad
            optimizers[rank].step()

    return params, optimizers, step


def average_states(optimizers: list[Any], weights: list[float], fields: tuple[str, ...]) -> None:
    """Average fields of the states of one-parameter optimizers, and make their step counts the largest."""
    states = [next(iter(optimizer.state.values()), None) for optimizer in optimizers]
    known = [(state, w) for state, w in zip(states, weights, strict=True) if state]
    for field in fields:
        mean = sum(w * state[field] for state, w in known) / sum(weights)
        for state, _ in known:
            state[field].copy_(mean)
    most = max(float(state["step"]) for state, _ in known)
    for state, _ in known:
        state["step"].fill_(most)


def averaged(
    make: Callable[[Any], torch.optim.Optimizer], start: Tensor, ranks: int, steps: int, grad: Grad,
    due: Callable[[int], int], sizes: list[int], weight: Callable[[int, int], float] | None,
    at_average: Callable[[int, list[Any], list[float]], None] = lambda step, optimizers, weights: None,
) -> list[Tensor]:  # fmt: skip
    """Local SGD in groups of neighbouring ranks: `due(step)` is the size of the groups that average after it, or 0.

    Args:
        sizes: All sizes of groups.
        weight: The weight of a batch; None for torch's plain mean of all ranks. An average weighs a rank by its batches
            since the last average in groups of this size or a larger one.
        at_average: `(step, optimizers, weights)`, called after an average over all ranks.
    """
    params, optimizers, step_one = inner_steps(make, start, ranks)
    windows = {size: [0.0] * ranks for size in sizes}
    for step in range(steps):
        for rank in range(ranks):
            g = grad(rank, step, params[rank].detach())
            step_one(rank, g)
            for window in windows.values():
                window[rank] += 0.0 if g is None or weight is None else weight(rank, step)
        size = due(step)
        for first in range(0, ranks if size else 0, size or 1):
            group = range(first, first + size)
            w = [1.0 if weight is None else windows[size][rank] for rank in group]
            for smaller in (s for s in sizes if s <= size):
                for rank in group:
                    windows[smaller][rank] = 0.0
            if sum(w) == 0:
                continue
            mean = sum(x * params[rank].detach() for x, rank in zip(w, group, strict=True)) / sum(w)
            with torch.no_grad():
                for rank in group:
                    params[rank].copy_(mean)
            if size == ranks:
                at_average(step, optimizers, w)
    return [p.detach() for p in params]


def diloco(
    make: Callable[[Any], torch.optim.Optimizer], outer: Callable[[Any], torch.optim.Optimizer], start: Tensor,
    ranks: int, steps: int, grad: Grad, every: int, weight: Callable[[int, int], float] | None,
    spans: list[tuple[int, int]] | None = None, delay: int = 0, mix: float = 0.0,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """DiLoCo, algorithm 1 of arXiv:2311.08105; with `spans`, `delay` and `mix` Streaming DiLoCo, arXiv:2501.18512.

    Args:
        weight: The weight of a batch; None for the plain mean of all ranks.
        spans: The start and the end of each fragment.

    Returns:
        The parameters of each rank, and the global ones.
    """
    params, _, step_one = inner_steps(make, start, ranks)
    spans = [(0, start.numel())] if spans is None else spans
    globals_ = [start[a:b].clone().requires_grad_() for a, b in spans]
    outers = [outer([g]) for g in globals_]
    windows = [[0.0] * ranks for _ in spans]
    waiting: list[Tensor | None] = [None for _ in spans]
    for step in range(steps):
        for rank in range(ranks):
            g = grad(rank, step, params[rank].detach())
            step_one(rank, g)
            for window in windows:
                window[rank] += 0.0 if g is None else 1.0 if weight is None else weight(rank, step)
        for i, (a, b) in enumerate(spans):
            first = (i + 1) * every // len(spans) - 1
            if step >= first and (step - first) % every == 0:
                w = windows[i] if weight is not None else [1.0] * ranks
                if sum(windows[i]):
                    change = [globals_[i].detach() - params[rank].detach()[a:b] for rank in range(ranks)]
                    waiting[i] = sum(x * d for x, d in zip(w, change, strict=True)) / sum(w)
                windows[i] = [0.0] * ranks
            if step >= first + delay and (step - first - delay) % every == 0 and waiting[i] is not None:
                globals_[i].grad, waiting[i] = waiting[i], None
                outers[i].step()
                with torch.no_grad():
                    for rank in range(ranks):
                        own = params[rank][a:b]
                        own.copy_(mix * own + (1 - mix) * globals_[i])
    return [p.detach() for p in params], torch.cat([g.detach() for g in globals_])
