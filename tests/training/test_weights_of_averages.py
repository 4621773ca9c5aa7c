"""Averages at the end of steps weigh by what has been trained since the last: by windows, by groups, and not by steps left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff, raises_text, seen_by
from tests.scalars import NAN, PLACES, Batch, check, loss, on_ranks, start
from tests.traffic import watched
from tests.training.small import step_of

RATE = 0.5
SGD, NODES, NOT = tx.sgd(RATE), {"node": 2, "local": 2}, tx.identity()
EACH_NODE = {"node": 2, "local": 1}
# By name: pipeline, the batches of each rank, the last `w` of each rank, axes.
CASES: dict[str, tuple[tx.Pipeline, list[Any], list[float], Any]] = {
    "a rank without input in the last step of a window": (
        tx.fuse(NOT, tx.sgd(1.0), after=tx.every(2, tx.mean("data"))),
        [[Batch(1.0, 1.0)] * 2, [Batch(10.0, 1.0), None]], [(2 * -2.0 + 1 * -10.0) / 3] * 2, None,
    ),
    "local weights (1, 0) and (2, 4): after a mean a rank counts by its node": (
        tx.fuse(tx.mean("local"), SGD, after=tx.mean("node")),
        [[1.0], [None], [2.0], [4.0]], [(1 * -0.5 + 6 * -0.5 * (2 * 2 + 4 * 4) / 6) / 7] * 4, NODES,
    ),
    "a window without weight": (
        tx.fuse(NOT, tx.sgd(0.5, momentum=0.9), after=tx.every(2, tx.mean("data"))), [[None] * 2] * 2, [0.0] * 2, None
    ),
    "two stages over one axis": (
        tx.fuse(tx.chain(tx.clip_by_value(1e9), tx.mean("data"), tx.mean("data")), SGD),
        [[1.0], [2.0], [3.0]], [-0.5 * (1 + 4 + 9) / 6] * 3, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str) -> None:
    pipeline, ranks, want, axes = CASES[name]
    check(pipeline, ranks, want, axes)


@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("hook", [lambda over: tx.mean("local", over), lambda over: NOT], ids=["reduces", "does not"])
def test_an_average_behind_a_window_counts_all_its_calls(over: Any, hook: Any) -> None:
    """1 + 2 + 5 of one rank against 4 of another, and not the last call's 5 against 1."""
    pipeline = tx.fuse(tx.accumulate(3, hook(over)), SGD, after=tx.mean("node"))
    first, second = -0.5 * (1 + 4 + 25) / 8, -0.5 * (4 + 1 + 1) / 4
    for seen in on_ranks(pipeline, [[1.0, 2.0, 5.0], [2.0, 1.0, 1.0]], axes=EACH_NODE):
        assert seen.w[-1] == pytest.approx((8 * first + 4 * second) / 12, abs=1e-12)


def test_a_rank_without_input_takes_no_local_step() -> None:
    """Its momentum does not move its parameters."""
    pipeline = tx.fuse(NOT, tx.sgd(1.0, momentum=0.9))
    check(pipeline, [[1.0] * 3, [1.0, None, None]], [[-1.0, -2.9, -5.61], [-1.0, -1.0, -1.0]])


# Rank 0 has a NaN in the second step, rank 1 in the third, rank 2 in the first two, which is all of its window.
LEFT_OUT = [
    [Batch(1.0, 2.0), Batch(NAN, 7.0), Batch(3.0, 1.0), Batch(1.0, 1.0)],
    [Batch(2.0, 3.0), Batch(4.0, 1.0), Batch(NAN, 9.0), Batch(2.0, 5.0)],
    [Batch(NAN, 8.0), Batch(NAN, 9.0), Batch(5.0, 2.0), Batch(1.0, 4.0)],
]


def averaged(over: str) -> list[list[float]]:
    """`w` of each rank after each step, averaged after the second and the fourth."""
    params, windows, seen = [0.0] * 3, [0.0] * 3, [[], [], []]  # type: ignore[var-annotated]
    for i in range(4):
        for r, batches in enumerate(LEFT_OUT):
            if not math.isnan(batches[i].grad):
                params[r] -= RATE * batches[i].grad
                windows[r] += batches[i].weight
        if i % 2:
            shares = {"weight": windows, "live": [float(w > 0) for w in windows], "world": [1.0] * 3}[over]
            params = [sum(s * p for s, p in zip(shares, params, strict=True)) / sum(shares)] * 3
            windows = [0.0] * 3
        for mine, value in zip(seen, params, strict=True):
            mine.append(value)
    return seen


KINDS: dict[str, Any] = {
    "average": lambda over: tx.fuse(NOT, SGD, after=tx.every(2, tx.average_parameters("data", over=over))),
    "outer": lambda over: tx.fuse(NOT, SGD, after=tx.outer_step(tx.mean("data", over), tx.sgd(1.0), 2)),
    "local SGD": lambda over: tx.local_sgd(SGD, tx.mean("data", over), 2),
    "mean": lambda over: tx.fuse(NOT, SGD, after=tx.every(2, tx.mean("data", over))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_left_out_counts_nothing(kind: str, over: Any) -> None:
    if kind == "mean" and over == "world":  # which divides by all ranks whatever takes part: not an average
        return
    check(tx.skip_if_nonfinite(KINDS[kind](over)), LEFT_OUT, averaged(over))


def test_ranks_of_a_node_skip_steps_together() -> None:
    """Both ranks of the first node leave the second step out; the average between nodes weighs by nodes' windows."""
    ranks = [
        [Batch(1.0, 1.0), Batch(NAN, 4.0)], [Batch(3.0, 3.0), Batch(8.0, 2.0)],
        [Batch(2.0, 2.0), Batch(4.0, 1.0)], [Batch(6.0, 2.0), Batch(2.0, 3.0)],
    ]  # fmt: skip
    first = -RATE * (1 * 1 + 3 * 3) / 4
    second = -RATE * (2 * 2 + 2 * 6) / 4
    later = second - RATE * (1 * 4 + 3 * 2) / 4
    both = (4 * first + (4 + 4) * later) / 12
    pipeline = tx.fuse(tx.mean("local"), SGD, after=tx.every(2, tx.mean("node")))
    check(tx.skip_if_nonfinite(pipeline), ranks, [[first, both]] * 2 + [[second, both]] * 2, NODES)


def test_the_optimizers_state_is_averaged_by_the_same_weights() -> None:
    """Momenta of ranks that have left out a step, after the second step; the momentum is that of torch's SGD."""
    pipeline = tx.skip_if_nonfinite(
        tx.fuse(NOT, tx.sgd(RATE, momentum=0.5), on_state=tx.every(2, tx.average_state("data")))
    )
    own, windows = [1.0, 2.0 * 0.5 + 4.0, 0.0], [2.0, 4.0, 0.0]
    want = sum(w * m for w, m in zip(windows, own, strict=True)) / 6.0
    for place in PLACES:
        for seen in on_ranks(pipeline, [batches[:2] for batches in LEFT_OUT], place):
            momentum = seen.state.inner.optimizer["w"].momentum
            assert max_diff(momentum, torch.full((2,), want, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hook", ["identity", "mean"])
def test_buffers_are_averaged_by_rank_weights(hook: str, on_device: bool) -> None:
    """A rank that leaves a step out has its buffers from before and weight 0; behind a mean all ranks leave it out."""

    def with_buffers(params: Any, buffers: Any, batch: Batch) -> Any:
        return loss(params, batch), None, {"n": buffers["n"] + (0.0 if math.isnan(batch.grad) else batch.grad)}

    pipeline = tx.skip_if_nonfinite(tx.fuse({"identity": NOT, "mean": tx.mean("data")}[hook], SGD))

    def one_rank(own: list[Batch]) -> list[float]:
        zeros, over = {"n": torch.zeros(2, dtype=torch.float64)}, tx.average_buffers("data")
        step, state = step_of(
            with_buffers, pipeline, start(), zeros, weight=lambda batch: batch.weight, on_buffers=over
        )
        return seen_by(lambda state, _: state.buffers["n"][0].item(), judged(step, on_device), state, own)

    batches = [[Batch(1.0, 2.0), Batch(NAN, 7.0)], [Batch(2.0, 6.0), Batch(4.0, 1.0)]]
    first = (2 * 1.0 + 6 * 2.0) / 8
    assert tx.simulate(one_rank, {"data": 2}, batches) == [[first, first + 4.0 if hook == "identity" else first]] * 2


# -- one counter decides on all periods, and ranks loop together over all axes ---------------------------


def plus_one(p: torch.Tensor) -> torch.Tensor:
    return p + 1


def test_one_counter_decides_on_all_periods() -> None:
    """Those in a state that has lost its place, such as a hook's that was started anew, follow the pipeline's."""
    pipeline = tx.fuse(tx.switch_after(3, tx.mean("data"), NOT), SGD, after=tx.every(2, tx.stateless(plus_one)))
    params = start()
    with fjoin.bind(fjoin.mesh({"data": -1})):
        state = pipeline.init(params)
        for _ in range(3):
            params, state = pipeline.step(params, params, state)
        fresh = pipeline.init(params)
        moved, after = pipeline.step(
            params, {path: 0 * p for path, p in params.items()}, state._replace(hook=fresh.hook, after=fresh.after)
        )
    assert state.step == 3 and after.hook.step == after.after.step == after.step == 4
    assert max_diff(moved["v"], params["v"] + 1) == 0


def test_loops_end_over_the_axes_of_the_parameter_transform_too() -> None:
    """Nodes with different numbers of batches end together, also while the hook's own axes are those of a node."""

    def looped(batches: list[float]) -> Any:
        step, state = step_of(lambda p, b: p["w"] * b, pipeline, {"w": torch.tensor(0.0)}, mesh=fjoin.mesh(NODES))
        seen = seen_by(lambda state, _: float(state.params["w"]), step, state, step.join(batches))
        return len(seen), seen[-1]

    pipeline = tx.fuse(tx.mean("local"), tx.sgd(1.0), after=tx.mean("node"))
    out = tx.simulate(looped, NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    assert out == [(2, -6.0)] * 4  # (-2 * 2 + -2 * 2) / 4, then the second node's -2 - 4 alone
    hook = tx.switch_after(2, tx.mean(("node", "local")), tx.mean("local"))
    pipeline = tx.fuse(hook, tx.sgd(1.0), after=tx.every(3, tx.mean("node")))
    out = tx.simulate(looped, NODES, [[1.0] * 3, [1.0] * 3, [1.0] * 5, [1.0] * 4])
    assert [calls for calls, _ in out] == [5] * 4
    assert {w for _, w in out[:2]} == {-3.0} and {w for _, w in out[2:]} == {-5.0}


def with_count(**settings: Any) -> Any:
    """A step whose buffers are averaged over all axes, the parameters' gradients over one; and the state."""
    return step_of(
        lambda p, buffers, b: (p["w"] * b, None, {**buffers, "v": buffers["v"] + b}), params={"w": torch.tensor(0.0)},
        buffers=BUFFERS, mesh=fjoin.mesh(NODES), on_buffers=OVER, **settings,
    )  # fmt: skip


OVER = tx.average_buffers(("node", "local"))
BUFFERS = {"v": torch.zeros(()), "count": torch.tensor(1)}


def test_loops_end_over_the_axes_of_the_buffers_too() -> None:
    def one(batches: list[float]) -> Any:
        step, state = with_count(pipeline=tx.fuse(tx.mean("local"), tx.sgd(1.0)))
        values = lambda state, _: (float(state.params["w"]), float(state.buffers["v"]))  # noqa: E731
        seen = seen_by(values, step, state, step.join(batches))
        return len(seen), *seen[-1]

    out = tx.simulate(one, NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    # The buffers: the mean of 1, 3, 2, 2, then of the one rank that has input. The first node takes one step only.
    assert out == [(2, -2.0, 6.0)] * 2 + [(2, -6.0, 6.0)] * 2


AFTER = tx.fuse(tx.mean("local"), SGD, after=tx.mean("node"))


@pytest.mark.gloo
def test_explain_includes_buffers_and_the_message_of_the_loop(pool: Any) -> None:
    """Messages go over the union of the axes and are counted at torch.distributed."""
    params = {"w": torch.tensor(0.0)}
    what = tx.explain(AFTER, params, NODES, buffers=BUFFERS, on_buffers=OVER)
    assert [row.stage for row in what.rows if row.messages] == [
        "mean('local')", "(the step's own counts)", "mean('node')", "average_buffers(('node', 'local'))"
    ]  # fmt: skip
    announced = sorted(m.payload_bytes for row in what.rows for m in row.messages)
    assert pool.run(4, sent_with_buffers) == [announced] * 4
    raises_text(ValueError, lambda: tx.explain(AFTER, params, NODES, on_buffers=OVER), "without buffers")


def sent_with_buffers() -> list[int]:
    """The bytes of the messages of a step."""
    step, state = with_count(pipeline=AFTER)
    state, _ = step(state, 1.0)
    with watched() as sent:
        step(state, 2.0)
    return sorted(one.bytes for one in sent)
