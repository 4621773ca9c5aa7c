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
    return (params["w"] * batch).sum()


def step_of(loss: Any = product, pipeline: tx.Pipeline = MEAN_SGD, **settings: Any) -> Any:
    """A step on float32 parameters w and v, and the state to start from."""
    step = fjoin.train_step(loss, pipeline, **settings)
    return step, step.init({"w": torch.ones(2), "v": torch.ones(2)})
