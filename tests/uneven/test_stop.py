"""Loops that one rank stops, on all ranks together; on processes, and without messages of its own, in test_left_loops.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped
from tests.training.small import MEAN_SGD, step_of

X = torch.ones(2)
SELDOM = tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 100)
# With the steps after which the ranks know of a request: one where no rank waits for the record of a step.
PIPELINES: dict[str, tuple[tx.Pipeline, int]] = {
    "mean": (MEAN_SGD, 0), "local SGD": (tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 3), 1), "seldom": (SELDOM, 1),
    "seldom, skips": (tx.skip_if_nonfinite(SELDOM), 1), "zero": (tx.zero(tx.mean("data"), tx.sgd(0.1), "data"), 0),
    "mean, on a device": (MEAN_SGD, 1), "seldom, on a device": (SELDOM, 2), "no message": (tx.fuse(tx.identity(), tx.sgd(0.1)), 1),
}  # fmt: skip


def stopped(
    batches: list[Any], calls: dict[int, str], pipeline: str = "mean", accumulate: int = 1, several: bool = False
) -> tuple[int, bool, int, int]:
    """A run in which this rank stops in the iterations of `calls`, before or after its step.

    Returns:
        The number of iterations, whether the loop was stopped, the number of the state's steps, and the iterations of a second loop.
    """
    step, state = step_of(pipeline=PIPELINES[pipeline][0], accumulate=accumulate)
    other, second = step_of(accumulate=accumulate) if several else (None, None)
    # The host reads the records of a device one step late, except where a rank reads its metrics.
    step.run.step_check.grads.on_device = "device" in pipeline
    reads = "device" in pipeline and bool(calls)
    loop = fjoin.join(batches, steps=[step, other]) if several else step.join(batches)
    found = []
    for stops in (calls, {}):
        n = 0
        for batch in loop:
            if stops.get(n) == "before":
                loop.stop()
            state, metrics = step(state, batch)
            if other is not None:
                second, _ = other(second, batch)
            assert not reads or metrics.weight > 0
            for _ in range({"after": 1, "twice": 2}.get(stops.get(n, ""), 0)):
                loop.stop()
            n += 1
        found += [n, loop.stopped, state.step]
    assert not found[4]
    step.flush(state)
    return found[0], found[1], found[2], found[3]


@pytest.mark.filterwarnings("ignore:.*nothing in the pipeline:UserWarning")
@pytest.mark.sample(3)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("when", ["before", "after", "twice"])
def test_one_rank_of_three_stops(pipeline: str, when: str) -> None:
    batches = [[X] * 9, [X] * 7, [X] * 2]
    for rank in (0, 2):  # with input, and without
        calls: list[dict[int, str]] = [{}, {}, {}]
        calls[rank] = {3: when}
        n = 4 + (when != "before") + PIPELINES[pipeline][1]
        got = tx.simulate(lambda b, c: stopped(b, c, pipeline), {"data": 3}, batches, calls)
        assert got == [(n, True, n, 9)] * 3


def test_with_windows_the_loop_ends_with_the_next_one() -> None:
    batches = [[X] * 12, [X] * 11, [X] * 2]
    for at, n in ((0, 3), (2, 6), (3, 6), (4, 6), (5, 9)):
        for pipeline in ("mean", "seldom"):
            got = tx.simulate(
                lambda b, c, p=pipeline: stopped(b, c, p, accumulate=3), {"data": 3}, batches, [{}, {at: "after"}, {}]
            )
            want = n + 3 * PIPELINES[pipeline][1]
            assert got == [(min(want, 12), True, min(want, 12) // 3, 12)] * 3, (at, pipeline)


def test_several_steps_stop_together() -> None:
    got = tx.simulate(lambda b, c: stopped(b, c, several=True), {"data": 2}, [[X] * 5, [X] * 3], [{}, {1: "after"}])
    assert got == [(3, True, 3, 5)] * 2


@pytest.mark.parametrize(
    "pipeline", ["mean", "local SGD", "seldom", "seldom, skips", "mean, on a device", "seldom, on a device"]
)
def test_a_request_of_the_last_iteration_does_not_stop_the_next_loop(pipeline: str) -> None:
    batches = [[X] * 3, [X] * 2]
    for when, was in (("before", True), ("after", False)):
        got = tx.simulate(lambda b, c: stopped(b, c, pipeline), {"data": 2}, batches, [{2: when}, {}])
        assert got == [(3, was, 3, 3)] * 2


def test_stop_outside_a_loop_raises() -> None:
    step, state = step_of()
    for loop in (step.join([X]), fjoin.join([X])):
        raises_text(fjoin.JoinError, loop.stop, "while no loop runs", "inside the body")
    loop = step.join([X])
    state = stepped(step, state, loop)
    raises_text(fjoin.JoinError, loop.stop, "while no loop runs")


def stopped_in_own_loop(n: int, at: int | None) -> tuple[int, bool, int]:
    loop = fjoin.join(range(n), empty=0)
    seen = 0
    for _ in loop:
        if seen == at:
            loop.stop()
        seen += 1
    was = loop.stopped
    return seen, was, sum(1 for _ in loop)


def test_a_loop_of_ones_own() -> None:
    """The message for the next iteration has left when the body runs, so the loop ends with that one."""
    for rank in (0, 2):
        calls: list[int | None] = [None] * 3
        calls[rank] = 2
        assert tx.simulate(stopped_in_own_loop, {"data": 3}, [6, 5, 1], calls) == [(4, True, 6)] * 3
    # The last message of a loop tells that no rank has a batch, and a request that it does not carry is void.
    assert tx.simulate(stopped_in_own_loop, {"data": 2}, [3, 2], [2, None]) == [(3, False, 3)] * 2
    assert tx.simulate(stopped_in_own_loop, {"data": 2}, [3, 2], [1, None]) == [(3, True, 3)] * 2
