"""Averages at the end of steps weigh by what has been trained since the last: by windows, by groups, and not by steps left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, seen_by
from tests.scalars import NAN, PLACES, Batch, check, on_ranks, start
from tests.traffic import watched
from tests.training.small import step_of

RATE = 0.5
SGD, NODES, NOT = tx.sgd(RATE), {"node": 2, "local": 2}, tx.identity()


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
