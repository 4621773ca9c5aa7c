"""One process on all ranks' batches together: data-parallel training must equal its result. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A smooth little network: with kinks a rounding error could change a sign."""
    g = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype) * 0.5)
    return model


def make_batches(seed: int, sizes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64) -> list[list[Batch]]:
    """For each rank a list of batches of the given sizes."""
    g = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype), torch.randint(0, 3, (n,), generator=g))
            for n in rank
        ]
        for rank in sizes
    ]


def mean_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[Batch]], over: str = "weight",
    loss: Callable[[torch.nn.Module, Batch], Tensor] = mean_loss, clip: float | None = None, ranks: int | None = None,
) -> list[float]:  # fmt: skip
    """Train on the batches of all ranks, step by step; a rank that is out of them is left out.

    Args:
        batches: For each rank its batches.
        over: "weight" the mean over all samples; "live" the mean of the ranks' own means; "world" their
            sum divided by the number of ranks.

    Returns:
        The loss over all samples in each step.
    """
    losses = []
    for i in range(max((len(b) for b in batches), default=0)):
        live = [b[i] for b in batches if i < len(b)]
        sizes = [len(batch[1]) for batch in live]
        means = [loss(model, batch) for batch in live]
        weighted = sum(n * m for n, m in zip(sizes, means, strict=True)) / sum(sizes)
        losses.append(weighted.item())
        if over == "weight":
            total = weighted
        else:
            total = sum(means) / (len(live) if over == "live" else ranks or len(batches))
        optimizer.zero_grad()
        total.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {path: p.detach().clone() for path, p in model.named_parameters()}


def slots(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Path -> the optimizer's state of that parameter."""
    return {path: dict(optimizer.state[p]) for path, p in model.named_parameters()}
