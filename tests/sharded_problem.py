"""A few parameters, with random gradients and uneven weights, for pipelines that shard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx

# Leaves that lie across every cut, are smaller than a piece, or have no elements.
SHAPES = {
    "a.weight": (9, 7), "a.bias": (9,), "b.weight": (33, 3), "scale": (), "empty": (0, 3), "b.bias": (33,), "c.weight": (4, 4),
}  # fmt: skip
STEPS = 12


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return {path: torch.randn(shape, generator=gen).to(dtype) for path, shape in SHAPES.items()}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(100 * rank + step)
    return {path: torch.randn(shape, generator=gen).to(dtype) for path, shape in SHAPES.items()}


def weight(rank: int, step: int) -> float:
    """Uneven; the last ranks have no input in some steps, and no rank has in step 5."""
    return 0.0 if step == 5 or (rank and (rank + step) % 4 == 0) else 1.0 + (rank + step) % 3


def run(
    pipeline: tx.Pipeline, sizes: dict[str, int], dtype: torch.dtype = torch.float32, steps: int = STEPS,
    change: Callable[[int, int, dict[str, Tensor]], dict[str, Tensor]] = lambda rank, step, g: g,
) -> list[Any]:  # fmt: skip
    ranks = functools.reduce(int.__mul__, sizes.values(), 1)

    def one_rank(rank: int) -> Any:
        params = start(dtype)
        state = pipeline.init(params)
        for step in range(steps):
            grads = change(rank, step, gradients(rank, step, dtype))
            params, state = pipeline.step(params, grads, state, weight=weight(rank, step))
        return params, state

    return tx.simulate(one_rank, sizes, list(range(ranks)))
