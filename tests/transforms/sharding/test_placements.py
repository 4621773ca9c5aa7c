"""The placements of states hold: replicated leaves are equal on all ranks, pieces make up the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.sharded_problem import run
from tests.sharded_table import PAIRS

ADAM = tx.adamw(0.01)
MEAN = tx.quantized_mean("data", tx.int8(block=8))
PIPELINES = {
    **{name: pair.sharded for name, pair in PAIRS.items() if not pair.axes},
    "mean": tx.fuse(tx.mean("data"), ADAM),
    "feedback": tx.fuse(tx.error_feedback(MEAN), ADAM),
    "ef21": tx.fuse(tx.ef21(MEAN), ADAM),
    "loco": tx.fuse(tx.loco(MEAN), ADAM),
    "dgc": tx.fuse(tx.dgc("data", 0.1), ADAM),
    "power": tx.fuse(tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0)), ADAM),
    "one bit": tx.fuse(tx.one_bit_adam("data", 4), tx.sgd(0.1)),
    "later": tx.fuse(tx.switch_after(2, tx.mean("data"), tx.error_feedback(MEAN)), ADAM),
    "windows": tx.fuse(tx.accumulate(2, tx.mean("data")), ADAM),
    "local": tx.local_sgd(ADAM, "data", 4),
    "outer": tx.diloco(ADAM, "data", 4, delay=2),
    "both ways": tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.scatter_mean("data"))), ADAM, gather=tx.int8()),
}


def leaves(state: Any) -> dict[str, Any]:
    """Path -> leaf."""
    found: dict[str, Any] = {}

    def walk(part: Any, path: str) -> None:
        items: Any = ()
        if hasattr(part, "_fields"):
            items = zip(part._fields, part, strict=True)
        elif isinstance(part, dict):
            items = part.items()
        elif isinstance(part, (tuple, list)):
            items = enumerate(part)
        elif part is not None:
            found[path.removeprefix(".")] = part
        for name, one in items:
            walk(one, f"{path}.{name}")

    walk(state, "")
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_placements(name: str) -> None:
    """After 7 steps: in the middle of windows, with residuals that differ."""
    pipeline, dtype = PIPELINES[name], torch.float32
    if name in PAIRS:
        dtype = PAIRS[name].options.get("dtype", dtype)
    states = [state for _, state in run(pipeline, {"data": 3}, dtype, steps=7)]
    kinds = tx.placements(pipeline, states[0])
    of = [leaves(state) for state in states]
    assert kinds.keys() == of[0].keys()
    differ = set()
    for path, kind in kinds.items():
        values = [one[path] for one in of]
        if kind is tx.Placement.REPLICATED:
            assert all(_same(value, values[0]) for value in values), path
        elif not all(_same(value, values[0]) for value in values):
            differ.add(kind)
        if kind is tx.Placement.PER_RANK:
            assert len({value.shape for value in values if isinstance(value, torch.Tensor)}) <= 1, path
    # `window` is 0 unless gradients are accumulated.
    marked = {kind for path, kind in kinds.items() if not path.endswith("window")}
    assert differ >= marked - {tx.Placement.REPLICATED}


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
