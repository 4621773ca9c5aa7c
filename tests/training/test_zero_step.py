"""A sharded pipeline in train_step equals the pure one, and, on real ranks whose sums are ordered, the unsharded one to the bit."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.base import devices
from tests.optimizer_table import OPTIMIZERS
from tests.sharded_problem import PAIRS, gradients, loss_fn, start
from tests.traffic import sent_to_others

ADAM, INT8 = tx.adamw(0.1), tx.int8()
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], float]:
    return gradients(rank, step, dtype), 1.0 + (rank + step) % 3


def train(
    pipeline: tx.Pipeline, mesh: fjoin.Mesh, left: int = 0, steps: int = 5, dtype: torch.dtype = torch.float32, bucket_bytes: int = 512
) -> Any:  # fmt: skip
    """The state after a rank's steps; it has so many batches less."""
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, weight=lambda b: b[1], bucket_bytes=bucket_bytes)
    state = step.init(start(dtype))
    for b in step.join([batch(step.rank, i, dtype) for i in range(steps - left)], empty=batch(0, 0, dtype)):
        state, _ = step(state, b)
    state = step.flush(state).clone()
    step.close()
    return state


PARTS = 4


def different(steps: int, part: int) -> list[str]:
    """The optimizers, and pipelines, whose sharded form trains other parameters; of a part of them."""
    mesh, found, rows = fjoin.mesh({"data": -1}, ordered=True), [], list[Any]()
    for name, makes in OPTIMIZERS.items():
        dtype = torch.bfloat16 if name == "mixed_precision" else torch.float32
        for make in makes:
            whole = tx.fuse(tx.chain(MEAN, tx.identity()), make())
            rows.append((repr(make()), whole, tx.zero(MEAN, make(), "data"), dtype, 0.0))
    for name, pair in PAIRS.items():
        if not pair.axes:
            dtype = pair.options.get("dtype", torch.float32)
            rows.append((name, pair.whole, pair.sharded, dtype, pair.tolerance))
    for name, whole, sharded, dtype, tolerance in rows[part::PARTS]:
        want, got = (train(p, mesh, mesh.rank % 2, steps, dtype).params for p in (whole, sharded))
        before = start(dtype)
        if name != "frozen()" and all(torch.equal(got[path], before[path]) for path in got):
            found.append(f"{name}: nothing moved")
        for path in want:
            if not torch.allclose(got[path], want[path], rtol=tolerance, atol=tolerance):
                found.append(f"{name}: {path} by {(got[path] - want[path]).abs().max():g}")
    return found


def sabotaged(steps: int, part: int) -> list[str]:
    """The same with gradients of a wrong rank's piece, which must differ."""
    right = devices.sum_of_pieces
    devices.sum_of_pieces = lambda *args: right(*args) * 1.0001
    try:
        return different(steps, part)
    finally:
        devices.sum_of_pieces = right  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "ranks, steps, part",
    [
        (3, 5, 0),
        (2, 5, 1),  # tests/transforms/sharding has all of them, simulated
        *(pytest.param(ranks, 5, part, marks=pytest.mark.long) for ranks, part in ((3, 2), (2, 3))),
        *(pytest.param(ranks, 100, part, marks=pytest.mark.long) for ranks in (2, 3, 4) for part in range(PARTS)),
    ],
)
def test_all_optimizers_and_pipelines(pool: Any, ranks: int, steps: int, part: int) -> None:
    assert pool.run(ranks, different, steps, part) == [[]] * ranks


@pytest.mark.gloo
def test_a_wrong_sum_is_noticed(pool: Any) -> None:
    assert pool.run(2, sabotaged, 2, 0)[0]


WIDE = {"a.weight": (70, 50), "a.bias": (70,), "b.weight": (50, 50), "b.bias": (50,), "big.bias": (1100, 1000)}
COUNTED = {
    "mean": tx.fuse(MEAN, ADAM), "zero": tx.zero(MEAN, ADAM, "data"),
    "clip": tx.zero(tx.chain(MEAN, tx.clip_by_global_norm(1.0)), ADAM, "data"),
    "muon": tx.zero(MEAN, tx.partition({"*.weight": tx.muon(0.1), "*": ADAM}), "data"),
    "int8": tx.fuse(tx.error_feedback(tx.compress(INT8, SCATTER)), ADAM, gather_codec=INT8),
}  # fmt: skip


def sent_bytes(name: str) -> tuple[list[int], int, dict[str, Tensor]]:
    """The bytes that this rank sends to others in each of three steps, counted at torch.distributed."""
    gen, seen = torch.Generator().manual_seed(dist.get_rank()), []
    step = fjoin.train_step(loss_fn, COUNTED[name], weight=lambda b: b[1])
    state = step.init({path: torch.ones(shape) for path, shape in WIDE.items()})
    for _ in range(4):
        grads = {path: torch.randn(shape, generator=gen) for path, shape in WIDE.items()}
        with sent_to_others() as sent:
            state, _ = step(state, (grads, 1.0))
        seen.append(sum(sent))
    slots = sum(
        t.numel() * 4 for t in optree.tree_leaves(state.pipeline.optimizer) if isinstance(t, Tensor) and t.dim()
    )
    return seen[1:], slots, state.clone().params  # in the first step the ranks compare their records too


@pytest.mark.gloo
@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_real_ranks_send_what_is_announced(pool: Any, ranks: int) -> None:
    params = {path: torch.ones(shape) for path, shape in WIDE.items()}
    totals, slots = {}, {}
    for name in COUNTED:
        found = pool.run(ranks, sent_bytes, name)
        assert found[0][0] == [tx.explain(COUNTED[name], params, {"data": ranks}).sent_bytes] * 3, name
        assert all(torch.equal(other[path], p) for *_, other in found for path, p in found[0][2].items()), name
        totals[name] = sum(max(steps) for steps, _, _ in found)
        slots[name] = max(own for _, own, _ in found)
    for name in ("zero", "clip"):
        assert totals[name] <= totals["mean"] + 2000 * ranks  # the counts
        assert slots[name] <= 1.03 * slots["mean"] / ranks
    assert totals["int8"] <= 0.27 * totals["mean"]


def test_an_error_names_the_parameters_of_all_pieces() -> None:
    """Each rank sees only its piece, but all name the same parameters."""

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(loss_fn, COUNTED["zero"], mesh=fjoin.mesh({"data": 3}))
        state, grads = step.init(start()), gradients(rank, 0)
        if rank == 1:
            for path in ("a.weight", "c.weight"):
                grads[path].view(-1)[-1] = torch.nan
        with pytest.raises(fjoin.NonFinite) as error:
            step(state, (grads, 1.0))
        return error.value.paths

    assert tx.simulate(one_rank, {"data": 3}, [0, 1, 2]) == [("c.weight", "a.weight")] * 3
