"""One problem for tests of whole steps: a tree of parameters, three losses, batches and weights by rank and step.

All numbers are hundredths, the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# A matrix, a convolution, a vector, a 0-d leaf, and one that no loss uses.
SHAPES = {"layer.weight": (3, 4), "conv.weight": (2, 1, 2), "bias": (3,), "scale": (), "unused": (2,)}
STEPS = 5
Params = Any

# The samples of a rank's batch in each step; 0: a batch of weight 0.
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "even": ((2, 2, 2, 2, 2),) * 4,
    "uneven": ((1, 4, 2, 3, 1), (3, 1, 1, 2, 4), (2, 2, 3, 1, 1), (4, 1, 2, 1, 3)),
    "idle": ((1, 0, 2, 3, 0), (0, 1, 4, 0, 1), (2, 3, 0, 1, 1), (0, 0, 1, 2, 0)),
    "no input": ((1, 0, 2, 3, 1), (0, 0, 4, 0, 2), (2, 0, 0, 1, 1), (1, 0, 1, 2, 0)),
    # A batch of NaN on one rank, which is one sample: steps that are left out.
    "poisoned": ((1, -1, 2, 3, 1), (3, 1, 0, 2, 4), (2, 2, 3, -1, 1), (4, 1, 2, 1, 3)),
    # Ranks whose input has ended go on without; the last has none at all.
    "ended": ((1, 4, 2, 3, 1), (3, 1, 0, 0, 0), (2, 2, 3, 1, 0), (0, 0, 0, 0, 0)),
}


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-100, 101, shape, generator=g).double() / 100).to(dtype)


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {path: numbers(i, shape, dtype) for i, (path, shape) in enumerate(SHAPES.items())}


def buffers(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"mean": torch.zeros(4, dtype=dtype)}


def size(sizes: str, rank: int, step: int) -> int:
    return SIZES[sizes][rank][step]


def batch(rank: int, step: int, samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, int]:
    """Samples, and their number; one sample of weight 0 in the place of none. -1: one that is not finite."""
    values = numbers(1000 + 100 * rank + step, (4, 4), dtype)[: max(samples, 1)]
    return (values * math.nan, 1) if samples < 0 else (values, samples)


def whole_batch(sizes: str, ranks: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, int]:
    """Those of all ranks in one."""
    parts = [batch(rank, step, n, dtype)[0] for rank in range(ranks) if (n := size(sizes, rank, step))]
    return (torch.cat(parts), sum(map(len, parts))) if parts else batch(0, step, 0, dtype)


def net(params: Params, batch: tuple[Tensor, int]) -> Tensor:
    """The mean over the samples of a small network's squared output."""
    hidden = torch.tanh(batch[0] @ params["layer.weight"].T + params["bias"])
    out = torch.nn.functional.conv1d(hidden[:, None], params["conv.weight"])
    return (out * params["scale"] - 0.5).square().mean()


def linear(params: Params, batch: tuple[Tensor, int]) -> Tensor:
    """A loss whose gradients do not depend on the parameters."""
    row = batch[0].mean(0)
    used = params["layer.weight"].sum(0) @ row + params["conv.weight"].sum() * row[0]
    return used + params["bias"].sum() * row[1] + params["scale"] * row[2]


def buffered(
    params: Params, buffers: dict[str, Tensor], batch: tuple[Tensor, int]
) -> tuple[Tensor, None, dict[str, Tensor]]:
    """`net` on input less its running mean."""
    mean = 0.5 * buffers["mean"] + 0.5 * batch[0].mean(0)
    return net(params, (batch[0] - mean, batch[1])), None, {"mean": mean}


LOSSES: dict[str, Callable[..., Any]] = {"net": net, "linear": linear, "buffered": buffered}


class Module(nn.Module):
    """The parameters and one of the first two losses as a module."""

    def __init__(self, loss: str = "net", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._loss = LOSSES[loss]
        self.layer, self.conv = nn.Module(), nn.Module()
        for path, value in start(dtype).items():
            *inner, name = path.split(".")
            (getattr(self, inner[0]) if inner else self).register_parameter(name, nn.Parameter(value))

    def forward(self, batch: tuple[Tensor, int]) -> Tensor:
        out: Tensor = self._loss(dict(self.named_parameters()), batch)
        return out
