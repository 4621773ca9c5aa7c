"""A stage is called alike wherever a step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx

HOOKS = {"a plain mean": tx.mean("data"), "an encoded mean": tx.compress(tx.float32(), tx.mean("data"))}


@pytest.mark.parametrize("name", HOOKS)
def test_stage_after_a_reduction_gets_the_weight_and_sums_of_the_group(name: str) -> None:
    """The weight is that of all ranks, and the lane holds their sums, in pipeline.step and in a train_step."""
    seen: list[tuple[float, Any, set[str]]] = []

    def update(grads: Any, state: Any, params: Any, call: tx.Call) -> Any:
        seen.append(
            (float(call.weight), call.group and (float(call.group.weight), call.group.axes), set(call.lane or {}))
        )
        return grads, state

    pipeline = tx.fuse(tx.chain(HOOKS[name], tx.Transform(lambda params: (), update, tx.Needs.TREE)), tx.sgd(0.1))
    params = {"w": torch.ones(3)}

    def purely(weight: float) -> None:
        pipeline.step(params, params, pipeline.init(params), weight=weight, lane={"loss": 1.0})

    def by_step(weight: float) -> None:
        step = fjoin.train_step(lambda p, batch: p["w"].sum(), pipeline, weight=lambda batch: batch)
        step(step.init(params), weight)

    for run in purely, by_step:
        seen.clear()
        tx.simulate(run, {"data": 2}, [1.0, 3.0])
        assert len(seen) == 2
        for weight, group, lane in seen:
            assert weight == 4.0 and group == (4.0, ("data",)) and {"weight", "loss"} <= lane
