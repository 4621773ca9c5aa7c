"""One counter decides on all periods, and ranks loop together over all axes of the pipeline and of the buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.scalars import Batch, on_ranks, run, start
from tests.traffic import watched

SGD, NODES, NOT = tx.sgd(0.5), {"node": 2, "local": 2}, tx.identity()


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


def test_every_in_every_counts_runs() -> None:
    pipeline = tx.fuse(NOT, SGD, after=tx.every(2, tx.every(3, tx.stateless(plus_one))))
    assert run(pipeline, [None] * 12).w == [0] * 5 + [1] * 6 + [2]


def looped(pipeline: tx.Pipeline, batches: list[float]) -> Any:
    step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline, mesh=fjoin.mesh(NODES))
    state, calls = step.init({"w": torch.tensor(0.0)}), 0
    for batch in step.join(batches):
        state, metrics = step(state, batch)
        calls += 1
    return calls, float(state.params["w"]), metrics.weight


def test_loops_end_over_the_axes_of_the_parameter_transform_too() -> None:
    """Nodes with different numbers of batches end together, and their average is weighted by the batches trained on."""
    pipeline = tx.fuse(tx.mean("local"), tx.sgd(1.0), after=tx.mean("node"))
    out = tx.simulate(lambda b: looped(pipeline, b), NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    assert out == [(2, -6.0, 1.0)] * 4  # (-2 * 2 + -2 * 2) / 4, then the second node's -2 - 4 alone


def test_ranks_loop_together_in_all_phases() -> None:
    """First global means, then those of nodes only: loops end over all ranks in both."""
    hook = tx.switch_after(2, tx.mean(("node", "local")), tx.mean("local"))
    pipeline = tx.fuse(hook, tx.sgd(1.0), after=tx.every(3, tx.mean("node")))
    out = tx.simulate(lambda b: looped(pipeline, b), NODES, [[1.0] * 3, [1.0] * 3, [1.0] * 5, [1.0] * 4])
    assert [calls for calls, *_ in out] == [5] * 4
    assert {w for _, w, _ in out[:2]} == {-3.0} and {w for _, w, _ in out[2:]} == {-5.0}


def with_buffers(**settings: Any) -> Any:
    """A step whose buffers are averaged over all axes, the parameters' gradients over one; and the state."""
    step = fjoin.train_step(
        lambda p, buffers, b: (p["w"] * b, None, {**buffers, "v": buffers["v"] + b}), mesh=fjoin.mesh(NODES),
        on_buffers=OVER, **settings,
    )  # fmt: skip
    return step, step.init({"w": torch.tensor(0.0)}, BUFFERS)


OVER = tx.average_buffers(("node", "local"))
BUFFERS = {"v": torch.zeros(()), "count": torch.tensor(1)}


def test_loops_end_over_the_axes_of_the_buffers_too() -> None:
    def one(batches: list[float]) -> Any:
        (step, state), calls = with_buffers(pipeline=tx.fuse(tx.mean("local"), tx.sgd(1.0))), 0
        for batch in step.join(batches):
            state, _ = step(state, batch)
            calls += 1
        return calls, float(state.params["w"]), float(state.buffers["v"])

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
    step, state = with_buffers(pipeline=AFTER)
    state, _ = step(state, 1.0)
    with watched() as sent:
        step(state, 2.0)
    return sorted(one.bytes for one in sent)


def test_an_axis_of_one_rank_needs_no_message() -> None:
    pipeline = tx.fuse(tx.mean("local"), SGD, after=tx.every(2, tx.mean("node")))
    axes = {"node": 1, "local": 2}
    assert "(the step's own counts)" not in [
        row.stage for row in tx.explain(pipeline, start(), axes).rows if row.messages
    ]
    for other in (pipeline, tx.fuse(tx.mean("node"), SGD, after=tx.every(2, tx.mean("local")))):
        ranks = [[1.0, 2.0, Batch(1.0, 3.0)], [2.0, None, None]]
        pure, step = on_ranks(other, ranks, axes=axes), on_ranks(other, ranks, "step", axes)
        assert max_diff([seen.params for seen in step], [seen.params for seen in pure]) < 1e-12
