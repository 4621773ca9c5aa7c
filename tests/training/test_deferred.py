"""Averages with a delay, and steps that do not wait for other ranks."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.groups import GroupAxis
from tests import problem
from tests.helpers import max_diff, stepped


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


PIPELINE = tx.diloco(
    tx.sgd(0.1, momentum=0.9), tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), every=4, delay=3, fragments=2
)


def interrupted(how: str) -> Any:
    """A run of 13 steps; interrupted, while a change waits for its message, by a run from a copy of its state, or by `close`."""
    step = fjoin.train_step(problem.net, PIPELINE, donate=how != "copies", mesh=fjoin.mesh({"data": 2}))
    state = step.init(problem.start())
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
