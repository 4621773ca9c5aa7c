"""One row's training in lockstep, on parameters, gradients and weights that are the same bits on every machine."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.goldens.golden_rows import ROWS, Row

# Leaves that lie across a cut, are smaller than a piece, are 0-d, or have no elements.
SHAPES = {"layer.weight": (3, 4), "layer.bias": (3,), "w": (2,), "scale": (), "none": (0, 2)}
STEPS = 5
# A rank's weight in a step. Powers of two make weighted gradients exact; with 0 a rank has no input.
WEIGHTS = {"powers": (1.0, 2.0, 4.0), "odd": (3.0, 5.0, 0.0)}


def _tree(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hundredths, which are rounded alike everywhere, where a normal distribution is not."""
    g = torch.Generator().manual_seed(seed)
    return {
        path: (torch.randint(-200, 201, shape, generator=g).double() / 100).to(dtype) for path, shape in SHAPES.items()
    }


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    return _tree(1, dtype)


def places(row: Row) -> list[tuple[int, ...]]:
    """The place of each rank on the axes, in rank order."""
    return list(itertools.product(*map(range, row.axes.values())))


def steps(row: Row, weights: str, rank: int) -> Iterator[tuple[Any, Any]]:
    """On one rank: the parameters and the state after each step."""
    pipeline, params = row.make(), start(row.dtype)
    state = pipeline.init(params)
    for step in range(STEPS):
        grads = _tree(1000 + 100 * rank + step, row.dtype)
        if row.poisoned and (rank, step) == (1, 2):
            grads["layer.weight"][1, 1] = float("inf")
        if hasattr(state, "scale"):  # of the loss
            grads = {path: g * state.scale.to(g.dtype) for path, g in grads.items()}
        params, state = pipeline.step(params, grads, state, weight=WEIGHTS[weights][(rank + step) % 3])
        yield params, state


def run(name: str, weights: str) -> list[Any]:
    """What each rank sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pipelines that do not reduce, which are rows too
        row = ROWS[name]
        return tx.simulate(lambda rank: list(steps(row, weights, rank)), row.axes, list(range(len(places(row)))))
