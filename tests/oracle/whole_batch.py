"""One process on all ranks' batches together: data-parallel training must equal its result. No fjoin here."""

from __future__ import annotations

from collections.abc import Sequence

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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[Batch]],
    clip: float | None = None,
) -> None:
    """Train on the mean over all ranks' samples, step by step; a rank that is out of batches is left out."""
    for i in range(max(map(len, batches))):
        x, y = (torch.cat(parts) for parts in zip(*(own[i] for own in batches if i < len(own)), strict=True))
        optimizer.zero_grad()
        mean_loss(model, (x, y)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {path: p.detach().clone() for path, p in model.named_parameters()}
