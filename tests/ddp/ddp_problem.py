"""A small problem for DistributedDataParallel on uneven inputs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def batches_of(counts: list[int]) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(n)] for n in counts]


def state_of(optimizer: Any, params: list[Any]) -> list[Any]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return []  # each rank has a part of it
    return [{k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items() if v is not None} for p in params]
