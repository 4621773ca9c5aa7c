"""Averages of parameters on real ranks: equal to the bit, in many buckets too; with a delay, and without waiting for counts."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.groups import GroupAxis
from tests import problem
from tests.helpers import max_diff, stepped
from tests.training.small import step_of

ADAM, MEAN = tx.adam(1e-2), tx.mean("data")
# Pipeline, bytes of a bucket, dtype.
PIPELINES = {
    "DiLoCo": (tx.diloco(ADAM, MEAN, 3), 64, torch.float32), "average": (tx.local_sgd(ADAM, MEAN, 3), 10**6, torch.float32),
    "int8": (tx.local_sgd(ADAM, tx.error_feedback(tx.compress(tx.int8(), MEAN)), 3), 300, torch.float32),
    "masters": (tx.diloco(tx.mixed_precision(ADAM), MEAN, 3), 64, torch.bfloat16),
}  # fmt: skip


def averages(name: str, rounds: int) -> Any:
    """How often parameters and outer state differ between ranks within the first ten rounds, and after an average."""
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
        apart, unequal = apart + (differ and i % 3 < 2 and i < 30), unequal + (differ and i % 3 == 2)
    return apart, unequal


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(
    "ranks, rounds", [(2, 60), (3, 60), *(pytest.param(n, 500, marks=pytest.mark.long) for n in (2, 3, 4))]
)
def test_averages_are_equal_to_the_bit(pool: Any, ranks: int, rounds: int, name: str) -> None:
    """Between them the ranks differ, until a long run comes to rest."""
    assert all(unequal == 0 and apart >= 10 for apart, unequal in pool.run(ranks, averages, name, rounds))


# -- averages with a delay -----------------------------------------------------------------------------


def batches(rank: int, steps: int) -> list[Any]:
    return [problem.batch(rank, step, 4) for step in range(steps)]


class Late:
    """A message that arrives some seconds later; `waited` is the seconds that steps have waited for such messages."""

    waited = 0.0

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._ready = work, time.monotonic() + seconds

    def wait(self) -> None:
        rest = max(0.0, self._ready - time.monotonic())
        Late.waited += rest
        time.sleep(rest)
        self._work.wait()


def computed(params: Any, batch: Any) -> Tensor:
    time.sleep(0.1)  # the computation
    return problem.net(params, batch)


def seconds_waited(slow_s: float) -> float:
    """The seconds that 12 steps wait for messages of counts, which take `slow_s`."""
    reduce_, Late.waited = GroupAxis.begin_reduce, 0.0

    def slow(self: Any, x: Tensor) -> Any:
        work = reduce_(self, x)
        return Late(work, slow_s) if x.numel() <= 15 else work

    GroupAxis.begin_reduce = slow  # type: ignore[method-assign,assignment]
    try:
        step = fjoin.train_step(computed, tx.diloco(tx.sgd(0.1), tx.mean("data"), every=4))
        stepped(step, step.init(problem.start()), batches(step.rank, 12))
        return Late.waited
    finally:
        GroupAxis.begin_reduce = reduce_  # type: ignore[method-assign]


def test_a_step_does_not_wait_for_counts(pool: Any) -> None:
    """The message of the counts takes 0.08 s and a step at least 0.1 s; only the three steps that average wait for it, and for the
    weights of their windows."""
    for waited in pool.run(2, seconds_waited, 0.08):
        assert waited < 6 * 0.08 + 0.1, waited


DELAYED = tx.diloco(
    tx.sgd(0.1, momentum=0.9), tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), every=4, delay=3, fragments=2
)


def interrupted(how: str) -> Any:
    """A run of 13 steps; interrupted, while a change waits for its message, by a run from a copy of its state, or by `close`."""
    step, state = step_of(problem.net, DELAYED, problem.start(), donate=how != "copies", mesh=fjoin.mesh({"data": 2}))
    for i, batch in enumerate(batches(step.rank, 13)):
        state, _ = step(state, batch)
        if i in (3, 5, 6) and how:
            before = state.clone().params
            if how == "copies":
                step(copy.deepcopy(state), batch)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the unfinished window
                    step.close()
            assert max_diff(state.clone().params, before) == 0
    return state.clone().params


@pytest.mark.parametrize("how", ["copies", "closes"])
def test_a_run_goes_on_while_a_change_waits(pool: Any, how: str) -> None:
    want = tx.simulate(lambda: interrupted(""), {"data": 2})
    for got, expected in zip(pool.run(2, interrupted, how), want, strict=True):
        assert max_diff(got, expected) < 1e-9
