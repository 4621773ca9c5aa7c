"""The weight of a step in an average is that of its window and of the ranks that share its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import stepped
from tests.training.plan_problem import MOMENTUM, NODES, SGD, product, purely, start, weight_of


def test_an_average_of_parameters_counts_its_window() -> None:
    """A rank without input in the last step of a window still counts with its earlier steps."""
    pipeline = tx.fuse(tx.identity(), tx.sgd(1.0), after=tx.every(2, tx.mean("data")))

    def one(batches: list[float]) -> float:
        step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline)
        state = stepped(step, step.init({"w": torch.tensor(0.0, dtype=torch.float64)}), step.join(batches))
        return float(state.params["w"])

    assert tx.simulate(one, {"data": 2}, [[1.0, 1.0], [10.0]]) == [(2 * -2.0 + 1 * -10.0) / 3] * 2


def test_rank_without_input_takes_no_local_step() -> None:
    """Without a reduction its momentum does not move its parameters."""
    pipeline = tx.fuse(tx.identity(), tx.sgd(1.0, momentum=0.9))

    def one(batches: list[float]) -> list[float]:
        step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline)
        state, seen = step.init({"w": torch.tensor(0.0)}), []
        for batch in step.join(batches):
            state, _ = step(state, batch)
            seen.append(round(float(state.params["w"]), 3))
        return seen

    assert tx.simulate(one, {"data": 2}, [[1.0, 1.0, 1.0], [1.0]]) == [[-1.0, -2.9, -5.61], [-1.0, -1.0, -1.0]]


def test_ranks_of_a_node_stay_equal_for_all_weights() -> None:
    """`after` is given the weight of the node, not of the rank: local weights (1, 0) and (1, 1)."""
    pipeline = tx.fuse(tx.mean("local"), SGD, after=tx.mean("node"))
    for batches in ([[1.0], [None], [2.0], [4.0]],):
        out = tx.simulate(lambda own: purely(pipeline, own)[0][-1]["w"][0].item(), NODES, batches)
        first, second = 1 - 0.5 * 1, 1 - 0.5 * (2 * 2 + 4 * 4) / 6
        assert max(abs(w - (1 * first + 6 * second) / 7) for w in out) < 1e-12


@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_an_average_behind_a_window_counts_all_its_calls(over: Any) -> None:
    """1 + 2 + 5 of one rank against 4 of another, and not the last call's 5 against 4."""
    hooks = {"reduces": tx.accumulate(3, tx.mean("local", over)), "does not": tx.accumulate(3, tx.identity())}
    for hook in hooks.values():
        pipeline = tx.fuse(hook, SGD, after=tx.mean("node"))
        out = tx.simulate(
            lambda own: purely(pipeline, own)[0][-1]["w"][0].item(),  # noqa: B023
            {"node": 2, "local": 1}, [[1.0, 2.0, 5.0], [2.0, 1.0, 1.0]],
        )  # fmt: skip
        first, second = 1 - 0.5 * (1 + 4 + 25) / 8, 1 - 0.5 * (4 + 1 + 1) / 4
        assert max(abs(w - (8 * first + 4 * second) / 12) for w in out) < 1e-12


def test_a_window_without_weight_changes_nothing() -> None:
    pipeline = tx.fuse(tx.identity(), MOMENTUM, after=tx.every(2, tx.mean("data")))
    out = tx.simulate(
        lambda own: purely(pipeline, own)[0][-1]["w"][0].item(), {"data": 2}, [[None, None], [None, None]]
    )
    assert out == [1.0, 1.0]


def test_the_lane_is_summed_once() -> None:
    """This holds if two stages reduce over one axis."""
    hook = tx.chain(tx.clip_by_value(1e9), tx.mean("data"), tx.mean("data"))

    def one(batch: float) -> Any:
        step = fjoin.train_step(product, tx.fuse(hook, SGD), weight=weight_of)
        state, metrics = step(step.init(start()), batch)
        return metrics.weight, state.params["w"][0].item()

    assert tx.simulate(one, {"data": 3}, [1.0, 2.0, 3.0]) == [(6.0, 1 - 0.5 * (1 + 4 + 9) / 6)] * 3
