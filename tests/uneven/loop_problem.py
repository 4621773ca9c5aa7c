"""A small problem for loops over uneven inputs."""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_batches

SIZES = [[3, 5], [4, 2, 6, 1]]


def samples(batch: Any) -> int:
    return len(batch[1])


def make_model() -> torch.nn.Module:
    """With sizes that tensor parallelism can divide by two."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def reference(sizes: list[list[int]]) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    whole_batch.train(model, optimizer, make_batches(1, sizes))
    return whole_batch.parameters(model)
