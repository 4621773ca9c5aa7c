"""Gradients for PowerSGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx

SHAPES = {"a": (12, 9), "b": (9, 12), "conv": (8, 3, 2, 2), "bias": (7,), "scale": (), "none": (0, 2), "thin": (2, 2)}
COMPRESSED = {"a", "b", "conv"}


def made(rank: int = 2, **settings: Any) -> tx.Transform:
    return tx.power_sgd("data", rank, **{"min_compression_rate": 1.0, **settings})


def draws(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {path: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for path, shape in SHAPES.items()}


def exact(seed: int, rank: int) -> dict[str, Tensor]:
    """Gradients that have this rank on every rank, and share their columns."""
    g = torch.Generator().manual_seed(7)
    left = {path: torch.randn(SHAPES[path][0], rank, generator=g, dtype=torch.float64) for path in sorted(COMPRESSED)}
    h, out = torch.Generator().manual_seed(seed), draws(seed, torch.float64)
    for path, u in left.items():
        out[path] = (u @ torch.randn(rank, out[path][0].numel(), generator=h, dtype=torch.float64)).view(SHAPES[path])
    return out


def exact32() -> dict[str, Tensor]:
    return {path: g.float() for path, g in exact(0, 2).items()}
