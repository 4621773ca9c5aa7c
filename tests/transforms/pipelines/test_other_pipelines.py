"""Ranks whose pure steps have other pipelines: a DesyncError in the first step, at no further message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fjoin import DesyncError, transforms as tx
from tests.helpers import raises_text

MEAN = tx.mean("data")
# By name: rank -> its pipeline.
PIPELINES: dict[str, Callable[[int], tx.Pipeline]] = {
    "a learning rate": lambda r: tx.fuse(MEAN, tx.sgd(0.1 * (r + 1))),
    "an optimizer": lambda r: tx.fuse(MEAN, (tx.sgd, tx.adam)[r](0.1)),
    "an optimizer with schedules": lambda r: tx.fuse(MEAN, (tx.sgd, tx.adam)[r](tx.cosine(0.1, 10))),
    "a clip": lambda r: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(0.1 * (r + 1))), tx.sgd(0.1)),
    "a codec": lambda r: tx.fuse(tx.compress((tx.int4, tx.int8)[r](), tx.mean("data")), tx.sgd(0.1)),
    "a mask": lambda r: tx.fuse(tx.masked(MEAN, "ab"[r]), tx.sgd(0.1)),
    "what follows": lambda r: tx.fuse(MEAN, tx.sgd(0.1), after=tx.every(2 + r, tx.average_parameters("data"))),
    "masters": lambda r: tx.fuse(MEAN, (tx.sgd(0.1), tx.mixed_precision(tx.sgd(0.1)))[r]),
    "what is skipped": lambda r: tx.skip_if_nonfinite(tx.fuse(MEAN, tx.sgd(0.1 * (r + 1)))),
    "what is sharded": lambda r: tx.zero(MEAN, tx.adam(0.1 * (r + 1)), "data"),
}


def steps(rank: int, make: Callable[[int], tx.Pipeline], ranks: tuple[int, int]) -> Any:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    pipeline = make(ranks[rank])
    state = pipeline.init(params)
    for _ in range(2):
        params, state = pipeline.step(params, {"a": torch.ones(2), "b": torch.full((2,), 3.0)}, state)
    return params


@pytest.mark.parametrize("name", PIPELINES)
def test_another_pipeline_is_named(name: str) -> None:
    make = PIPELINES[name]
    raises_text(DesyncError, lambda: tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(0, 1)] * 2), "rank 1", "pipeline")  # fmt: skip
    for equal in (0, 1):
        tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(equal, equal)] * 2)


def test_a_schedule_of_an_outer_optimizer_that_differs_by_rank() -> None:
    def make(r: int) -> tx.Pipeline:
        def rate(step: Any) -> float:
            return 0.1 if step < 1 else 0.1 * (r + 1)

        return tx.diloco(tx.sgd(0.1), tx.mean("data"), every=1, outer=tx.sgd(rate))

    raises_text(DesyncError, lambda: tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(0, 1)] * 2), "rank 1", "lr=0.2")  # fmt: skip


@tx.factory
def _with(of: Any = None) -> tx.Transform:
    return tx.Transform(lambda params: (), lambda grads, state, params=None, **extra: (grads, state))


@pytest.mark.parametrize(
    "of",
    [torch.device("cpu"), np.ones(2), {1}, slice(2), range(3), 1j, b"x", object()],
    ids=lambda of: type(of).__name__,
)
def test_factories_may_have_arguments_of_any_kind(of: Any) -> None:
    def make(r: int) -> tx.Pipeline:
        return tx.fuse(tx.chain(_with(of), MEAN), tx.sgd(0.1))

    tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(0, 1)] * 2)
