"""Ranks loop together over all axes of a pipeline, in all of its phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.traffic import watched
from tests.training.plan_problem import NODES, SGD, UNEVEN, by_step, product, purely, start


def looped(pipeline: tx.Pipeline, batches: list[float], **options: Any) -> Any:
    step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline, mesh=fjoin.mesh(NODES), **options)
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


def test_loops_end_over_the_axes_of_the_buffers_too() -> None:
    def one(batches: list[float]) -> Any:
        step = fjoin.train_step(
            lambda p, buffers, b: (p["w"] * b, None, {"v": buffers["v"] + b}), tx.fuse(tx.mean("local"), tx.sgd(1.0)),
            mesh=fjoin.mesh(NODES), on_buffers=tx.average_buffers(("node", "local")),
        )  # fmt: skip
        state, calls = step.init({"w": torch.tensor(0.0)}, {"v": torch.tensor(0.0)}), 0
        for batch in step.join(batches):
            state, _ = step(state, batch)
            calls += 1
        assert state.buffers is not None
        return calls, float(state.params["w"]), float(state.buffers["v"])

    out = tx.simulate(one, NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    # The buffers: the mean of 1, 3, 2, 2, then of the one rank that has input. The first node takes one step only.
    assert out == [(2, -2.0, 6.0)] * 2 + [(2, -6.0, 6.0)] * 2


@pytest.mark.gloo
def test_explain_includes_buffers_and_the_message_of_the_loop(pool: Any) -> None:
    """Messages go over the union of the axes and are counted at torch.distributed."""
    pipeline, over = tx.fuse(tx.mean("local"), SGD, after=tx.mean("node")), tx.average_buffers(("node", "local"))
    buffers = {"n": torch.zeros(3), "count": torch.tensor(1)}
    what = tx.explain(pipeline, start(), NODES, buffers=buffers, on_buffers=over)
    assert [row.stage for row in what.rows if row.messages] == [
        "mean('local')", "(the step's own counts)", "mean('node')", "average_buffers(('node', 'local'))"
    ]  # fmt: skip
    announced = sorted(m.payload_bytes for row in what.rows for m in row.messages)
    assert [sorted(sent) for sent in pool.run(4, sent_with_buffers, NODES)] == [announced] * 4
    raises_text(ValueError, lambda: tx.explain(pipeline, start(), NODES, on_buffers=over), "without buffers")


def sent_with_buffers(axes: dict[str, int]) -> list[int]:
    """The bytes of the messages of a step."""
    step = fjoin.train_step(
        lambda p, buffers, b: (product(p, b), None, {**buffers, "n": buffers["n"] + b}),
        tx.fuse(tx.mean("local"), SGD, after=tx.mean("node")), mesh=fjoin.mesh(axes), on_buffers=tx.average_buffers(("node", "local")),
    )  # fmt: skip
    state = step.init(start(), {"n": torch.zeros(3), "count": torch.tensor(1)})
    state, _ = step(state, 1.0)
    with watched() as sent:
        step(state, 2.0)
    return [one.bytes for one in sent]


def test_an_axis_of_one_rank_needs_no_message() -> None:
    pipeline = tx.fuse(tx.mean("local"), SGD, after=tx.every(2, tx.mean("node")))
    sent = [row.stage for row in tx.explain(pipeline, start(), {"node": 1, "local": 2}).rows if row.messages]
    assert "(the step's own counts)" not in sent
    alone = tx.fuse(tx.mean("node"), SGD, after=tx.every(2, tx.mean("local")))
    for other in (pipeline, alone):
        axes, batches = {"node": 1, "local": 2}, UNEVEN["uneven"][:2]
        want = tx.simulate(lambda own: purely(other, own)[0], axes, batches)  # noqa: B023
        got = tx.simulate(lambda own: by_step(other, axes, own, False)[0], axes, batches)  # noqa: B023
        assert max_diff(got, want) < 1e-12


def test_ranks_loop_together_in_all_phases() -> None:
    """First global means, then those of nodes only: loops end over all ranks in both."""
    hook = tx.switch_after(2, tx.mean(("node", "local")), tx.mean("local"))
    pipeline = tx.fuse(hook, tx.sgd(1.0), after=tx.every(3, tx.mean("node")))
    batches = [[1.0] * 3, [1.0] * 3, [1.0] * 5, [1.0] * 4]
    out = tx.simulate(lambda b: looped(pipeline, b), NODES, batches)
    assert [calls for calls, *_ in out] == [5] * 4
    assert {w for _, w, _ in out[:2]} == {-3.0} and {w for _, w, _ in out[2:]} == {-5.0}
