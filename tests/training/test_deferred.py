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

PIPELINE = tx.diloco(
    tx.sgd(0.1, momentum=0.9), tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), every=4, delay=3, fragments=2
)


def loss(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"]).tanh() @ params["v"]).square().mean()


def start() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    return {"w": torch.randn(8, 16, generator=gen), "v": torch.randn(16, generator=gen)}


def batches(rank: int, steps: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(rank + 1)
    return [torch.randn(4, 8, generator=gen) for _ in range(steps)]


def purely(steps: int) -> Any:
    params: Any = start()
    state = PIPELINE.init(params)
    for batch in batches(int(tx.axis_index("data")), steps):
        params, state = PIPELINE.step(params, torch.func.grad(loss)(params, batch), state)
    return params


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


def interrupted(copies: bool) -> Any:
    """A run that goes on from a copy of its state, or after `close`, while a change waits for its message."""
    step = fjoin.train_step(loss, PIPELINE, donate=not copies)
    state = step.init(start())
    for i, batch in enumerate(batches(step.rank, 13)):
        state, _ = step(state, batch)
        if i in (3, 5, 6):
            before = state.clone().params
            if copies:
                step(copy.deepcopy(state), batch)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the unfinished window
                    step.close()
            assert max_diff(state.clone().params, before) == 0
    return state.clone().params


@pytest.mark.parametrize("copies", [True, False])
def test_a_run_goes_on_while_a_change_waits(pool: Any, copies: bool) -> None:
    """Also where another run has begun from a copy of its state."""
    want = tx.simulate(lambda: purely(13), {"data": 2})
    for got, expected in zip(pool.run(2, interrupted, copies), want, strict=True):
        assert max_diff(got, expected) < 1e-2
