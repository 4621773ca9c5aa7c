"""On real ranks a sharded pipeline equals the unsharded one to the bit, where sums are ordered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.axes import _environment as _piece_sum
from tests.helpers import stepped
from tests.optimizer_table import OPTIMIZERS
from tests.sharded_problem import PAIRS, gradients, loss_fn, start


def train(pipeline: tx.Pipeline, mesh: Any, steps: int, dtype: torch.dtype) -> dict[str, Tensor]:
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, weight=lambda b: b[1], bucket_bytes=512)
    state = step.init(start(dtype))
    data = [(gradients(step.rank, i, dtype), 1.0 + (step.rank + i) % 3) for i in range(steps - step.rank % 2)]
    state = stepped(step, state, step.join(data))
    new = state.clone().params
    step.close()
    return dict(new)


PARTS = 4


def different(steps: int, part: int) -> list[str]:
    """The optimizers, and pipelines, whose sharded form trains other parameters; of a part of them."""
    mesh, found = fjoin.mesh({"data": -1}, ordered=True), []
    rows: list[Any] = []
    for name, makes in OPTIMIZERS.items():
        dtype = torch.bfloat16 if name == "mixed_precision" else torch.float32
        for make in makes:
            whole = tx.fuse(tx.chain(tx.mean("data"), tx.identity()), make())
            rows.append((repr(make()), whole, tx.zero(tx.mean("data"), make(), "data"), dtype, 0.0))
    for name, pair in PAIRS.items():
        if not pair.axes:
            dtype = pair.options.get("dtype", torch.float32)
            rows.append((name, pair.whole, pair.sharded, dtype, pair.tolerance))
    for name, whole, sharded, dtype, tolerance in rows[part::PARTS]:
        want, got = train(whole, mesh, steps, dtype), train(sharded, mesh, steps, dtype)
        before = start(dtype)
        if name != "frozen()" and all(torch.equal(got[path], before[path]) for path in got):
            found.append(f"{name}: nothing moved")
        for path in want:
            if not torch.allclose(got[path], want[path], rtol=tolerance, atol=tolerance):
                found.append(f"{name}: {path} by {(got[path] - want[path]).abs().max():g}")
    return found


def sabotaged(steps: int, part: int) -> list[str]:
    """The same with gradients of a wrong rank's piece, which must differ."""
    right = _piece_sum.sum_of_pieces
    _piece_sum.sum_of_pieces = lambda *args: right(*args) * 1.0001  # type: ignore[attr-defined]
    try:
        return different(steps, part)
    finally:
        _piece_sum.sum_of_pieces = right  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "ranks, steps, part",
    [
        (3, 5, 0),
        *(pytest.param(ranks, 100, part, marks=pytest.mark.long) for ranks in (2, 3, 4) for part in range(PARTS)),
    ],
)
def test_all_optimizers_and_pipelines(pool: Any, ranks: int, steps: int, part: int) -> None:
    for found in pool.run(ranks, different, steps, part):
        assert found == []


@pytest.mark.gloo
def test_a_wrong_sum_is_noticed(pool: Any) -> None:
    assert pool.run(2, sabotaged, 2, 0)[0]
