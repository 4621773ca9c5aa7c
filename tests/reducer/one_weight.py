"""A DistributedDataParallel of one weight, whose gradient is its input, in torch's Join or in ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fjoin


def scalar() -> DistributedDataParallel:
    """y = w x with w = 0 and float64: the gradient of w is the input."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def weight(ddp: DistributedDataParallel) -> float:
    return float(ddp.module.weight.item())


def x(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def joined(kind: str, joinables: list[Any], **kwargs: Any) -> Any:
    """torch's Join takes no plain optimizers; ours takes them."""
    if kind == "torch":
        return Join([j for j in joinables if hasattr(j, "join_hook")], **kwargs)
    return fjoin.Join(joinables, **kwargs)
