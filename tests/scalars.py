"""Programs whose gradients are numbers that a test gives, in the places in which a pipeline may step.

The parameters are `w`, of two zeros, and `v`, of three ones, with the gradients g and 2 g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged

NAN = math.nan
PLACES = ("pure", "step", "device")  # in the last the device judges the gradients


class Batch(NamedTuple):
    grad: float
    weight: float


Given = float | Batch | None  # a number counts by its magnitude; None is a rank without input


def as_batch(given: Given) -> Batch:
    if isinstance(given, tuple):
        return given
    return Batch(0.0, 0.0) if given is None else Batch(given, 1.0 if math.isnan(given) else abs(given))


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.zeros(2, dtype=dtype), "v": torch.ones(3, dtype=dtype)}


def loss(params: Any, batch: Batch) -> Tensor:
    return (params["w"] * batch.grad).sum() + 2 * (params["v"] * batch.grad).sum()


class Seen(NamedTuple):
    """What one rank saw: the parameters after each step, and the pipeline's last state."""

    params: list[dict[str, Tensor]]
    state: Any

    @property
    def w(self) -> list[float]:
        return [params["w"][0].item() for params in self.params]


def run(
    pipeline: tx.Pipeline, batches: Sequence[Given], place: str = "pure", axes: Any = None,
    dtype: torch.dtype = torch.float64, flushes: int = 0, **options: Any,
) -> Seen:  # fmt: skip
    """One rank's steps, and so many flushes after them."""
    params, seen, given = start(dtype), [], [as_batch(one) for one in batches]
    if place == "pure":
        state = pipeline.init(params)
        for batch in given:
            grads = {path: torch.full_like(p, batch.grad * (1 + (path == "v"))) for path, p in params.items()}
            params, state = pipeline.step(params, grads, state, weight=batch.weight)
            seen.append(params)
        for _ in range(flushes):
            params, state = pipeline.flush(params, state)
            seen.append(params)
        return Seen(seen, state)
    options = {"weight": lambda batch: batch.weight, "mesh": fjoin.mesh(axes or {"data": -1})} | options
    step = judged(fjoin.train_step(loss, pipeline, **options), place == "device")
    held = step.init(params)
    for batch in given:
        held, _ = step(held, batch)
        seen.append({path: p.clone() for path, p in held.params.items()})
    for _ in range(flushes):
        held = step.flush(held)
        step.close()  # without a warning
        seen.append({path: p.clone() for path, p in held.params.items()})
    return Seen(seen, held.clone().pipeline)


def on_ranks(
    pipeline: tx.Pipeline, ranks: Sequence[Sequence[Given]], place: str = "pure", axes: Any = None, **more: Any
) -> list[Seen]:
    """What simulated ranks saw, of whom each has its batches."""
    axes = axes or {"data": len(ranks)}
    return tx.simulate(lambda own: run(pipeline, own, place, axes, **more), axes, list(ranks))


def check(pipeline: tx.Pipeline, ranks: Sequence[Sequence[Given]], want: Sequence[Any], axes: Any = None) -> None:
    """Each rank's `w` after each step, in all places, or its last where one number is wanted."""
    for place in PLACES:
        for seen, expected in zip(on_ranks(pipeline, ranks, place, axes), want, strict=True):
            found = seen.w if isinstance(expected, list) else seen.w[-1]
            assert found == pytest.approx(expected, abs=1e-12), place


class Module(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(p) for p in start(dtype).values())

    def forward(self, batch: Batch) -> Tensor:
        return loss({"w": self.w, "v": self.v}, batch)


def registered(pipeline: tx.Pipeline, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any]:
    """The pipeline in a module on this process: the module inside, its handle, and a function that runs a pass on a batch."""
    model = DistributedDataParallel(Module(dtype))
    handle = fjoin.ddp.register(model, pipeline)

    def train(given: Given) -> None:
        batch = as_batch(given)
        handle.weight(batch.weight)
        model.zero_grad()
        model(batch).backward()

    return model.module, handle, train


def own(ranks: Sequence[Sequence[Given]]) -> Sequence[Given]:
    """The batches of this process."""
    return ranks[dist.get_rank()]
