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


def one_process_of_diloco(ranks: int, every: int, outer_lr: float, momentum: float) -> dict[str, Tensor]:
    """The parameters after one epoch of DiLoCo in plain torch, with all ranks' models in one process."""
    models, batches = [make_model() for _ in range(ranks)], [make_batches(r) for r in range(ranks)]
    optimizers = [torch.optim.AdamW(m.parameters(), LEARNING_RATE) for m in models]
    shared = make_model()
    sgd = torch.optim.SGD(shared.parameters(), outer_lr, momentum=momentum, nesterov=True)
    samples, last = [0] * ranks, max(map(len, batches)) - 1
    for i in range(last + 1):
        for r, own in enumerate(batches):
            if i < len(own):
                optimizers[r].zero_grad()
                loss(models[r], own[i]).backward()
                optimizers[r].step()
                samples[r] += len(own[i][1])
        if (i + 1) % every == 0 or i == last:
            for p, *copies in zip(shared.parameters(), *(m.parameters() for m in models), strict=True):
                p.grad = sum(n * (p.detach() - c.detach()) for n, c in zip(samples, copies, strict=True)) / sum(samples)
            sgd.step()
            for m in models:
                m.load_state_dict(shared.state_dict())
            samples = [0] * ranks
    return {path: p.detach() for path, p in shared.named_parameters()}


def finish(params: dict[str, Tensor], every_sample_counts: bool) -> None:
    """Compare with one process, print the difference, and exit, with 1 if it is too large."""
    compare(params, one_process(dist.get_world_size(), every_sample_counts))


def compare(params: dict[str, Tensor], want: dict[str, Tensor], largest: float = 1e-12) -> None:
    """Print the difference from the result of one process, and exit, with 1 if it is too large."""
    worst = max(float((params[path] - p).abs().max()) for path, p in want.items())
    print(f"rank {dist.get_rank()}: {worst:.1e} from one process on all data", flush=True)
    dist.destroy_process_group()
    sys.exit(worst > largest)
