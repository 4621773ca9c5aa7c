"""Parameters, gradients, weights and losses that are the same bits on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.goldens.golden_rows import Row

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


def gradients(row: Row, rank: int, step: int) -> dict[str, Tensor]:
    grads = _tree(1000 + 100 * rank + step, row.dtype)
    if row.poisoned and (rank, step) == (1, 2):
        grads["layer.weight"][1, 1] = float("inf")
    return grads


def weight(weights: str, rank: int, step: int) -> float:
    return WEIGHTS[weights][(rank + step) % 3]


def loss_of(params: Any, grads: dict[str, Tensor]) -> Tensor:
    """A loss with these gradients, in float32 or float64."""
    wide = torch.promote_types(params["w"].dtype, torch.float32)
    total: Any = sum((params[path].to(wide) * grads[path].to(wide)).sum() for path in SHAPES)
    return total


def loss_fn(kind: str) -> Callable[..., Any]:
    """The loss of a batch (gradients, weight) for train_step."""

    def with_buffers(params: Any, buffers: Any, batch: Any) -> Any:
        seen = {name: b * 0.5 + batch[0]["w"] for name, b in buffers.items()}
        return loss_of(params, batch[0]), None, seen

    def with_sums(params: Any, batch: Any) -> Any:
        return loss_of(params, batch[0]), {"sum": {"tokens": 7.0 * batch[1]}}

    def plain(params: Any, batch: Any) -> Any:
        return loss_of(params, batch[0])

    return {"plain": plain, "sums": with_sums, "buffers": with_buffers}[kind]


def buffers_of(kind: str) -> dict[str, Tensor] | None:
    return {"mean": torch.zeros(2), "var": torch.ones(2)} if kind == "buffers" else None


class Module(nn.Module):
    """A module with these parameters, whose loss has the given gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Module()
        for path, value in start(dtype).items():
            *inner, name = path.split(".")
            (self.layer if inner else self).register_parameter(name, nn.Parameter(value))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return loss_of(dict(self.named_parameters()), grads)
