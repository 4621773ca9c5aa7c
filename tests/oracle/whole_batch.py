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
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[Any]], over: str = "weight",
    loss: Callable[[torch.nn.Module, Any], Tensor] = mean_loss, *, window: int = 1, of_window: bool = False, clip: float | None = None,
    before_step: Callable[[torch.nn.Module], Any] | None = None,
) -> None:  # fmt: skip
    """Train on the batches of all ranks, step by step; a rank that is out of them is left out.

    Args:
        batches: For each rank its batches.
        over: "weight" the mean over all samples; "live" the mean of the means of the ranks with input; "world" their sum divided
            by the number of ranks. For the last two a window that no rank completes is not stepped.
        window: Iterations to a step; a rank that ends within a window contributes the gradients that it has.
        of_window: Whether "with input" means in any iteration of the window; otherwise in its last one.
    """
    for first in range(0, max(map(len, batches)), window):
        given = [own[first : first + window] for own in batches]
        if over != "weight" and max(map(len, given)) < window:
            break
        parts = [batch for own in given for batch in own]
        sizes = [len(batch[1]) if over == "weight" else 1 for batch in parts]
        live = sum(len(own) > (0 if of_window else window - 1) for own in given)
        divisor = {"weight": sum(sizes), "live": live, "world": len(batches)}[over]
        optimizer.zero_grad()
        sum(
            (n * loss(model, batch) / divisor for n, batch in zip(sizes, parts, strict=True)), torch.zeros(())
        ).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if before_step is not None:
            before_step(model)
        optimizer.step()


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {path: p.detach().clone() for path, p in model.named_parameters()}
