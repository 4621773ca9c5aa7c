"""Averages with a delay, and steps that do not wait for other ranks."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.groups import GroupAxis
from tests.helpers import max_diff, stepped

STREAMS = {
    "one fragment": dict(every=4, delay=2),
    "fragments": dict(every=6, delay=3, fragments=2, mix=0.5),
    "encoded": dict(reduction=tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), every=4, delay=3),
    "all the time": dict(every=2, delay=1),
}


def pipeline(name: str) -> tx.Pipeline:
    return tx.diloco(tx.sgd(0.1, momentum=0.9), **{"reduction": tx.mean("data")} | STREAMS[name])  # type: ignore[arg-type]


def loss(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"]).tanh() @ params["v"]).square().mean()


def start() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    return {"w": torch.randn(8, 16, generator=gen), "v": torch.randn(16, generator=gen)}


def batches(rank: int, steps: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(rank + 1)
    return [torch.randn(4, 8, generator=gen) for _ in range(steps)]


def by_step(name: str, steps: int, donate: bool) -> Any:
    step = fjoin.train_step(loss, pipeline(name), donate=donate)
    state = stepped(step, step.init(start()), batches(step.rank, steps))
    return state.clone().params, state.pipeline.after


def purely(name: str, steps: int) -> Any:
    pure, rank = pipeline(name), int(tx.axis_index("data"))
    params: Any = start()
    state = pure.init(params)
    for batch in batches(rank, steps):
        params, state = pure.step(params, torch.func.grad(loss)(params, batch), state)
    return params, state.after


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, donate", [*((name, True) for name in STREAMS), ("fragments", False)])
def test_a_train_step_equals_the_pure_pipeline(pool: Any, name: str, donate: bool) -> None:
    """At every end of a run, with a change that waits for its message too."""
    for steps in (5, 13):
        want = tx.simulate(lambda: purely(name, steps), {"data": 2})  # noqa: B023
        for got, expected in zip(pool.run(2, by_step, name, steps, donate), want, strict=True):
            assert max_diff(got, expected) < (1e-5 if name != "encoded" else 1e-2)


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


def seconds_waited(slow_s: float) -> float:
    """The seconds that 12 steps wait for messages of counts, which take `slow_s`."""
    reduce_, Late.waited = GroupAxis.begin_reduce, 0.0

    def slow(self: Any, x: Tensor) -> Any:
        work = reduce_(self, x)
        return Late(work, slow_s) if x.numel() <= 100 else work

    GroupAxis.begin_reduce = slow  # type: ignore[method-assign,assignment]
    try:
        step = fjoin.train_step(computed, tx.diloco(tx.sgd(0.1), tx.mean("data"), every=4))
        stepped(step, step.init(start()), batches(step.rank, 12))
        return Late.waited
    finally:
        GroupAxis.begin_reduce = reduce_  # type: ignore[method-assign]


def computed(params: Any, batch: Tensor) -> Tensor:
    time.sleep(0.1)  # the computation
    return loss(params, batch)


def test_a_step_does_not_wait_for_counts(pool: Any) -> None:
    """The message of the counts takes 0.08 s and a step at least 0.1 s; only the three steps that average wait for it, and for the
    weights of their windows."""
    for waited in pool.run(2, seconds_waited, 0.08):
        assert waited < 6 * 0.08 + 0.1, waited


def resumed() -> Any:
    """A run that goes on from a copy of its state, saved while a change waits for its message."""
    step = fjoin.train_step(loss, pipeline("encoded"), donate=False)
    state = stepped(step, step.init(start()), batches(step.rank, 5))
    again = copy.deepcopy(state._body.ends.after)
    pending = {k: v.clone() for k, v in state._body.ends.after.pending.items()}
    state = stepped(step, state, batches(step.rank, 9)[5:])
    return max_diff(again.pending, pending) == 0, state.clone().params


def test_a_state_with_a_change_that_waits_can_be_copied(pool: Any) -> None:
    want = tx.simulate(lambda: purely("encoded", 9)[0], {"data": 2})
    for (same, params), expected in zip(pool.run(2, resumed), want, strict=True):
        assert same and max_diff(params, expected) < 1e-2


def closed_in_between() -> Any:
    step = fjoin.train_step(loss, pipeline("fragments"))
    state = step.init(start())
    for i, batch in enumerate(batches(step.rank, 13)):
        state, _ = step(state, batch)
        if i in (3, 6):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the unfinished window
                step.close()
    return state.clone().params, state.pipeline.after


def test_a_step_goes_on_after_close(pool: Any) -> None:
    want = tx.simulate(lambda: purely("fragments", 13), {"data": 2})
    for got, expected in zip(pool.run(2, closed_in_between), want, strict=True):
        assert max_diff(got, expected) < 1e-5
