"""The problem of the recipes: batches of uneven number and size, and the reference result of one process."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
LEARNING_RATE = 0.05


def start() -> tuple[int, int]:
    """Join the other ranks; returns (this rank, number of ranks)."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # started with plain python
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def make_batches(rank: int) -> list[Batch]:
    """Rank r has 5 + 3 r batches of 2 to 9 samples."""
    g = torch.Generator().manual_seed(100 + rank)
    sizes = torch.randint(2, 10, (5 + 3 * rank,), generator=g).tolist()
    return [(torch.randn(n, 6, generator=g).double(), torch.randint(0, 3, (n,), generator=g)) for n in sizes]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def one_process(ranks: int, every_sample_counts: bool) -> dict[str, Tensor]:
    """The parameters after one epoch in plain torch.

    Args:
        ranks: The number of ranks whose batches to train on.
        every_sample_counts: Whether to take the mean over all samples of a step; otherwise the sum of the ranks' own
            means divided by the number of ranks, as DistributedDataParallel does.
    """
    model, batches = make_model(), [make_batches(rank) for rank in range(ranks)]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for i in range(max(map(len, batches))):
        live = [own[i] for own in batches if i < len(own)]
        samples = sum(len(batch[1]) for batch in live)
        factors = [len(batch[1]) / samples if every_sample_counts else 1 / ranks for batch in live]
        optimizer.zero_grad()
        sum(f * loss(model, batch) for f, batch in zip(factors, live, strict=True)).backward()
        optimizer.step()
    return {path: p.detach() for path, p in model.named_parameters()}


def finish(params: dict[str, Tensor], every_sample_counts: bool) -> None:
    """Compare with one process, print the difference, and exit, with 1 if it is too large."""
    want = one_process(dist.get_world_size(), every_sample_counts)
    worst = max(float((params[path] - p).abs().max()) for path, p in want.items())
    print(f"rank {dist.get_rank()}: {worst:.1e} from one process on all data", flush=True)
    dist.destroy_process_group()
    sys.exit(worst > 1e-12)
