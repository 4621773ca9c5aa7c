"""A loss that normalizes over the batches of all ranks, and its gradient on each rank, in plain torch. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
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
