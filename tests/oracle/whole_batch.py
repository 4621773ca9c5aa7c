"""One process on all ranks' batches together: data-parallel training must equal its result; and a loss that normalizes
over the batches of all ranks. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
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


# -- a loss that normalizes over the batches of all ranks, and its gradient on each rank --

START_SHAPES = {"layer.weight": (4, 4), "layer.bias": (4,), "scale": (4,), "head": (4, 1)}


def start(dtype: torch.dtype) -> Params:
    g = torch.Generator().manual_seed(1)
    return {path: torch.randn(shape, generator=g).to(dtype) for path, shape in START_SHAPES.items()}


def batches(sizes: Sequence[int]) -> list[Batch]:
    """Consecutive rows of one batch."""
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(sum(sizes), 4, generator=g).double() * 2, torch.randn(sum(sizes), 1, generator=g).double()
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def loss_of(params: Params, batch: Batch, normalize: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over this rank's batch, in at least float32."""
    wide = torch.promote_types(params["scale"].dtype, torch.float32)
    p = {path: leaf.to(wide) for path, leaf in params.items()}
    x, y = (part.to(wide) for part in batch)
    hidden = normalize(x @ p["layer.weight"].T) * p["scale"] + p["layer.bias"]
    return (torch.tanh(hidden) @ p["head"] - y).square().mean()


def own_gradients(of_ranks: Sequence[Batch], factors: Sequence[float], dtype: torch.dtype) -> list[Params]:
    """By rank: the gradient of sum_r factor_r * loss_r by this rank's own copy of the parameters."""
    copies = [{path: leaf.requires_grad_() for path, leaf in start(dtype).items()} for _ in of_ranks]
    wide = torch.promote_types(dtype, torch.float32)
    hidden = [x.to(wide) @ p["layer.weight"].to(wide).T for p, (x, _) in zip(copies, of_ranks, strict=True)]
    whole = torch.nn.functional.batch_norm(torch.cat(hidden), None, None, training=True)
    rows = whole.split([len(x) for x in hidden])
    losses = [loss_of(p, b, lambda _, own=own: own) for p, b, own in zip(copies, of_ranks, rows, strict=True)]  # type: ignore[misc]
    total: Any = sum(factor * loss for factor, loss in zip(factors, losses, strict=True))
    found = torch.autograd.grad(total, [leaf for p in copies for leaf in p.values()])
    size = len(START_SHAPES)
    return [dict(zip(START_SHAPES, found[i * size : (i + 1) * size], strict=True)) for i in range(len(copies))]


def gradient_of_all(of_ranks: Sequence[Batch], dtype: torch.dtype) -> Params:
    """The gradient of one process on the rows of all ranks."""
    p = {path: leaf.requires_grad_() for path, leaf in start(dtype).items()}
    whole = torch.cat([x for x, _ in of_ranks]), torch.cat([y for _, y in of_ranks])
    loss = loss_of(p, whole, lambda h: torch.nn.functional.batch_norm(h, None, None, training=True))
    return dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))
