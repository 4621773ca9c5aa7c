"""Messages with a delay travel while later steps run."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.groups.axes._axis import GroupAxis
from tests.helpers import max_diff

STREAMS = {
    "one fragment": dict(every=4, delay=2),
    "fragments": dict(every=6, delay=3, fragments=2, mix=0.5),
    "encoded": dict(every=4, delay=3, wire=tx.int8()),
    "all the time": dict(every=2, delay=1),
}


def pipeline(name: str) -> tx.Pipeline:
    return tx.diloco(tx.sgd(0.1, momentum=0.9), "data", **STREAMS[name])  # type: ignore[arg-type]


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
    state = step.init(start())
    for batch in batches(step.rank, steps):
        state, _ = step(state, batch)
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
def test_late_messages_change_no_result(pool: Any, name: str, donate: bool) -> None:
    """At every end of a run, with a message under way too: reading the state waits for it."""
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


def seconds_waited(delay: int, slow_s: float, counts: bool = False) -> float:
    """The seconds that 12 steps wait for messages of parameters, or of counts, which take `slow_s`."""
    reduce_, Late.waited = GroupAxis.begin_reduce, 0.0

    def slow(self: Any, x: Tensor) -> Any:
        work = reduce_(self, x)
        return Late(work, slow_s) if (x.numel() > 100) != counts else work

    GroupAxis.begin_reduce = slow  # type: ignore[method-assign,assignment]
    try:
        step = fjoin.train_step(computed, tx.diloco(tx.sgd(0.1), "data", every=4, delay=delay))
        state = step.init(start())
        for batch in batches(step.rank, 12):
            state, _ = step(state, batch)
        return Late.waited
    finally:
        GroupAxis.begin_reduce = reduce_  # type: ignore[method-assign]


def computed(params: Any, batch: Tensor) -> Tensor:
    time.sleep(0.1)  # the computation
    return loss(params, batch)


@pytest.mark.gloo
def test_a_message_travels_during_the_steps_between(pool: Any) -> None:
    """A message takes 0.25 s and a step at least 0.1 s: with a delay of 3 steps none waits for it."""
    assert all(waited > 0.6 for waited in pool.run(2, seconds_waited, 0, 0.25))
    assert all(waited < 0.05 for waited in pool.run(2, seconds_waited, 3, 0.25))


def test_a_step_does_not_wait_for_counts(pool: Any) -> None:
    """The message of the counts takes 0.08 s and a step at least 0.1 s; only the three steps that average wait for it."""
    for waited in pool.run(2, seconds_waited, 0, 0.08, True):
        assert waited < 3 * 0.08 + 0.1, waited


def under_way(name: str) -> Any:
    """The number of reductions under way after each step, and parameters and anchor; rank 0 reads the state in each."""
    step = fjoin.train_step(loss, pipeline(name))
    state, seen = step.init(start()), []
    for batch in batches(step.rank, 21):
        state, _ = step(state, batch)
        seen.append(step.run.deferred.under_way)
        if step.rank == 0:
            state.clone().pipeline  # noqa: B018
    return seen, state.clone().params, state.pipeline.after


def test_the_state_can_be_read_on_one_rank_while_messages_are_under_way(pool: Any) -> None:
    for name in ("one fragment", "encoded", "fragments"):
        want = tx.simulate(lambda: purely(name, 21), {"data": 2})  # noqa: B023
        for (seen, params, after), expected in zip(pool.run(2, under_way, name), want, strict=True):
            if name == "one fragment":
                assert seen == [0, 0, 0, 1, 1, 0, 0] + [1, 1, 0, 0] * 3 + [1, 1]
            assert max_diff((params, after), expected) < (1e-5 if name != "encoded" else 1e-2)


def resumed() -> Any:
    """A run that goes on from a copy of its state, saved while a message is under way."""
    step = fjoin.train_step(loss, pipeline("encoded"), donate=False)
    state = step.init(start())
    for batch in batches(step.rank, 5):
        state, _ = step(state, batch)
    again, pending = (
        copy.deepcopy(state._body.ends.after),
        {k: v.clone() for k, v in state._body.ends.after.pending.items()},
    )
    for batch in batches(step.rank, 9)[5:]:
        state, _ = step(state, batch)
    return max_diff(again.pending, pending) == 0, state.clone().params


def test_a_state_with_a_message_under_way_can_be_copied(pool: Any) -> None:
    want = tx.simulate(lambda: purely("encoded", 9)[0], {"data": 2})
    for (same, params), expected in zip(pool.run(2, resumed), want, strict=True):
        assert same and max_diff(params, expected) < 1e-2


def left_behind(how: str) -> int:
    """The threads that are left after several runs of five steps, the last of which begins a message."""
    step, before = None, set(threading.enumerate())
    for _ in range(4):
        if step is None or how != "init":
            step = fjoin.train_step(loss, pipeline("one fragment"))
        state = step.init(start())
        for batch in batches(step.rank, 5):
            state, _ = step(state, batch)
        assert step.run.deferred.under_way == 1
        if how == "close":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the unfinished window
                step.close()
            assert step.run.deferred.under_way == 0
    if how != "init":
        del step
        gc.collect()
    end = time.monotonic() + 20
    while (left := len(set(threading.enumerate()) - before)) > (how == "init") and time.monotonic() < end:
        time.sleep(0.01)  # a dropped thread ends by itself
    return left


@pytest.mark.parametrize("how", ["close", "init", "drop"])
def test_messages_under_way_leave_with_their_run(pool: Any, how: str) -> None:
    assert pool.run(2, left_behind, how) == [1 if how == "init" else 0] * 2


def taken_again(how: str) -> Any:
    """The largest number of functions under way where each step is taken twice, and the final parameters."""
    step, most = fjoin.train_step(loss, pipeline("encoded"), donate=how != "old states"), 0
    state = step.init(start())
    for batch in batches(step.rank, 21):
        step(state.clone() if how == "copies" else state, 2 * batch)
        state, _ = step(state, batch)
        most = max(most, step.run.deferred.under_way)
    return most, state.clone().params


@pytest.mark.parametrize("how", ["copies", "old states"])
def test_messages_of_steps_that_are_taken_again_are_dropped(pool: Any, how: str) -> None:
    want = tx.simulate(lambda: purely("encoded", 21)[0], {"data": 2})
    for (most, params), expected in zip(pool.run(2, taken_again, how), want, strict=True):
        assert most <= 2 and max_diff(params, expected) < 1e-2


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
