"""A small problem for tests of the shell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx

X = torch.tensor([1.0, 2.0], dtype=torch.float64)


def quadratic(params: Any, batch: Tensor) -> Tensor:
    return ((params["w"] * batch).sum() - 1) ** 2 + params["b"].sum() ** 2


def start() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.5, -0.5], dtype=torch.float64), "b": torch.tensor(0.25, dtype=torch.float64)}


def one(pipeline: tx.Pipeline, **settings: Any) -> tuple[fjoin.TrainStep, fjoin.TrainState]:
    """A step on it, and the state to start from."""
    step = fjoin.train_step(quadratic, pipeline, **settings)
    return step, step.init(start())


MEAN_SGD = tx.fuse(tx.mean("data"), tx.sgd(0.1))


def product(params: Any, batch: Tensor) -> Tensor:
    """Of w; the gradient of v, where there is one, is 0."""
    return (params["w"] * batch).sum() + sum(0.0 * params[path].sum() for path in params.keys() - {"w"})


def step_of(
    loss: Any = product, pipeline: tx.Pipeline = MEAN_SGD, params: Any = None, buffers: Any = None, **settings: Any
) -> Any:
    """A step, by default on float32 parameters w and v, and the state to start from."""
    step = fjoin.train_step(loss, pipeline, **settings)
    return step, step.init({"w": torch.ones(2), "v": torch.ones(2)} if params is None else params, buffers)


def net_params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 4), "a.bias": (4,), "b.weight": (4, 3), "b.bias": (3,), "none": (0, 2), "scale": ()}
    return {path: torch.randn(shape, generator=g, dtype=torch.float64) for path, shape in shapes.items()}


def net_loss(params: Any, batch: Tensor) -> Tensor:
    x = torch.tanh(batch @ params["a.weight"] + params["a.bias"]) @ params["b.weight"] + params["b.bias"]
    return (x * params["scale"]).square().mean() + params["none"].sum()


def net_batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
