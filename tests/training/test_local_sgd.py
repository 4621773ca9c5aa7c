"""Averages of parameters on real ranks are equal to the bit, in many buckets too."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests import problem
from tests.helpers import max_diff

NODES, ADAM, MEAN = {"node": 2, "local": 2}, tx.adam(1e-2), tx.mean("data")
# Pipeline, bytes of a bucket, dtype.
PIPELINES = {
    "DiLoCo": (tx.diloco(ADAM, MEAN, 3), 64, torch.float32), "average": (tx.local_sgd(ADAM, MEAN, 3), 10**6, torch.float32),
    "int8": (tx.local_sgd(ADAM, tx.error_feedback(tx.compress(tx.int8(), MEAN)), 3), 300, torch.float32),
    "masters": (tx.diloco(tx.mixed_precision(ADAM), MEAN, 3), 64, torch.bfloat16),
}  # fmt: skip


def averages(name: str, rounds: int) -> Any:
    """How often parameters and outer state differ between ranks within a round, and after its average."""
    pipeline, bucket_bytes, dtype = PIPELINES[name]
    mesh = fjoin.mesh({"data": -1})
    step = fjoin.train_step(problem.net, pipeline, mesh=mesh, bucket_bytes=bucket_bytes)
    state, apart, unequal = step.init(problem.start(dtype)), 0, 0
    for i in range(3 * rounds):
        state, _ = step(state, problem.batch(step.rank, i, 4, dtype))
        after = state.pipeline.after
        shared: Any = (state.params, getattr(after, "anchor", ()), getattr(after, "optimizer", ()))
        flat = torch.cat([leaf.reshape(-1).double() for leaf in optree.tree_leaves(shared)])
        with fjoin.bind(mesh):
            differ = bool((tx.pmax(flat, "data") != tx.pmin(flat, "data")).any())
        apart, unequal = (apart, unequal + differ) if i % 3 == 2 else (apart + differ, unequal)
    return apart, unequal


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(
    "ranks, rounds", [(2, 60), (3, 60), *(pytest.param(n, 500, marks=pytest.mark.long) for n in (2, 3, 4))]
)
def test_averages_are_equal_to_the_bit(pool: Any, ranks: int, rounds: int, name: str) -> None:
    """Between them the ranks differ."""
    assert pool.run(ranks, averages, name, rounds) == [(2 * rounds, 0)] * ranks


def nested(steps: int) -> Any:
    """Period 1 on nested axes, without any other synchronization."""
    after = tx.chain(
        *(tx.every(1, tx.average_parameters(axes)) for axes in ("local", ("node", "local"), "node"))  # type: ignore[arg-type]
    )
    step = fjoin.train_step(problem.net, tx.fuse(tx.identity(), ADAM, after=after), mesh=fjoin.mesh(NODES))
    state = step.init(problem.start(torch.float32))
    for i in range(steps):
        state, _ = step(state, problem.batch(step.rank, i, 4, torch.float32))
    return state.clone().params


@pytest.mark.long
def test_averages_on_nested_axes_in_every_step(pool: Any) -> None:
    first, *others = pool.run(4, nested, 500)
    assert all(max_diff(first, other) < 1e-5 for other in others)
