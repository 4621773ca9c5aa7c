"""The placements of a few pipelines, spelled out: a placement that says too little would only be written too often."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.transforms.axes import bound
from fjoin.transforms.pipelines import buffers_placement, params_placement, placed

ONE, TWO = {"data": 2}, {"node": 2, "local": 2}
ADAM = tx.adamw(0.1)
INT8 = tx.compress(tx.int8(), tx.mean("data"))
# pipeline, axes, the axes over which parameters are equal, and of some values (equal, cut).
KNOWN: dict[str, tuple[tx.Pipeline, dict[str, int], tuple[str, ...], dict[str, tuple[tuple[str, ...], str | None]]]] = {
    "mean": (tx.fuse(tx.mean("data"), ADAM), ONE, ("data",), {"optimizer.w.exp_avg": (("data",), None), "hook.total": (("data",), None)}),
    "feedback": (
        tx.fuse(tx.error_feedback(INT8), ADAM), ONE, ("data",),
        {"hook.error.w": ((), None), "hook.inner.total": (("data",), None), "optimizer.w.exp_avg": (("data",), None)},
    ),
    "zero": (
        tx.zero(tx.mean("data"), ADAM, "data"), ONE, ("data",),
        {"optimizer.w.exp_avg": ((), "data"), "optimizer.w.step": (("data",), None)},
    ),
    "local": (tx.local_sgd(ADAM, tx.mean("data"), 4), ONE, (), {"optimizer.w.exp_avg": ((), None), "after.weight": ((), None)}),
    "DiLoCo": (tx.diloco(ADAM, tx.mean("data"), 4), ONE, (), {"optimizer.w.exp_avg": ((), None), "after.anchor.w": (("data",), None)}),
    "average each step": (tx.fuse(tx.identity(), ADAM, after=tx.average_parameters("data")), ONE, ("data",), {}),
    "two means": (
        tx.fuse(tx.chain(tx.mean("local"), tx.mean("node")), ADAM), TWO, ("node", "local"),
        {"hook.0.total": (("local",), None), "hook.1.total": (("node", "local"), None)},
    ),
    "local steps of nodes": (
        tx.fuse(tx.mean("local"), ADAM, after=tx.every(4, tx.average_parameters("node"))), TWO, ("local",),
        {"optimizer.w.exp_avg": (("local",), None), "hook.total": (("local",), None)},
    ),
    "zero in a node": (
        tx.fuse(tx.chain(tx.scatter_mean("local"), tx.mean("node")), ADAM), TWO, ("node", "local"),
        {"optimizer.w.exp_avg": (("node",), "local"), "optimizer.w.step": (("node", "local"), None)},
    ),
    "an average of averages": (
        tx.fuse(tx.identity(), ADAM, after=tx.chain(tx.every(4, tx.average_parameters("data")), tx.ema(0.9))), ONE, (),
        {"after.1.average.w": ((), None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_placements_are_these(name: str) -> None:
    pipeline, axes, params, known = KNOWN[name]

    def of(_: Any) -> Any:
        places = {
            leaf.path: leaf.placement
            for leaf in placed(pipeline, pipeline.init({"w": torch.ones(64)}), bound())
            if leaf.placement
        }
        return {path: (place.equal, place.cut) for path, place in places.items()}

    found = tx.simulate(of, axes, list(range(math.prod(axes.values()))))[0]
    assert params_placement(pipeline, axes).equal == params
    assert {path: found.get(path, sorted(found)) for path in known} == known


def test_buffers_are_equal_where_they_are_averaged() -> None:
    assert buffers_placement(None, ONE).equal == ()
    assert buffers_placement(tx.average_buffers("data"), ONE).equal == ("data",)
    assert buffers_placement(tx.every(2, tx.average_buffers("data")), ONE).equal == ()
    by_path = {"a": tx.average_buffers("data"), "*": tx.broadcast_buffers("data")}
    assert buffers_placement(tx.partition(by_path), ONE).equal == ("data",)
    both = {"a": tx.average_buffers("node"), "*": tx.average_buffers(("node", "local"))}
    assert buffers_placement(tx.partition(both), {"node": 2, "local": 2}).equal == ("node",)
