"""A sharded pipeline in train_step equals the unsharded one, and the pure one."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.optimizer_table import OPTIMIZERS
from tests.sharded_problem import PAIRS, gradients, loss_fn, start
from tests.traffic import sent_to_others


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], float]:
    return gradients(rank, step, dtype), 1.0 + (rank + step) % 3


def train(pipeline: tx.Pipeline, sizes: dict[str, int], steps: int = 5, **options: Any) -> list[Any]:
    dtype, bucket_bytes = options.get("dtype", torch.float32), options.get("bucket_bytes", 512)

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(
            loss_fn, pipeline, mesh=fjoin.mesh(sizes), weight=lambda b: b[1], bucket_bytes=bucket_bytes
        )
        state = step.init(start(dtype))
        for b in step.join([batch(rank, i, dtype) for i in range(steps - rank % 3)], empty=batch(0, 0, dtype)):
            state, _ = step(state, b)
        state = step.flush(state)
        return state.clone()

    ranks = 1
    for n in sizes.values():
        ranks *= n
    return tx.simulate(one_rank, sizes, list(range(ranks)))


def same(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        for path, value in other.params.items():
            assert torch.equal(one.params[path], value), path


@pytest.mark.sample(8)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name, i", [(name, i) for name, rows in OPTIMIZERS.items() for i in range(len(rows))])
def test_every_optimizer(name: str, i: int, ranks: int) -> None:
    optimizer, dtype = OPTIMIZERS[name][i](), torch.bfloat16 if name == "mixed_precision" else torch.float32
    want = train(tx.fuse(tx.chain(tx.mean("data"), tx.identity()), optimizer), {"data": ranks}, dtype=dtype)
    got = train(tx.zero(tx.mean("data"), optimizer, "data"), {"data": ranks}, dtype=dtype)
    same(got, want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PAIRS)
def test_every_pipeline(name: str) -> None:
    pair = PAIRS[name]
    for sizes in [pair.axes] if pair.axes else [{"data": 2}, {"data": 3}]:
        got, want = train(pair.sharded, sizes, **pair.options), train(pair.whole, sizes, **pair.options)
        for one, other in zip(got, want, strict=True):
            for path, value in other.params.items():
                torch.testing.assert_close(
                    one.params[path], value, rtol=pair.tolerance, atol=pair.tolerance, msg=f"{sizes} {path}"
                )


@pytest.mark.parametrize("gather", [None, tx.int8()])
def test_a_node_without_input_gets_the_average_of_the_others(gather: tx.Codec | None) -> None:
    pipeline = tx.fuse(tx.scatter_mean("local"), tx.adamw(0.1), tx.average_parameters("node"), gather_codec=gather)

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(loss_fn, pipeline, mesh=fjoin.mesh({"node": 2, "local": 2}), weight=lambda b: b[1])
        state = step.init(start())
        for b in step.join([batch(rank, i) for i in range(3 if rank < 2 else 0)], empty=batch(0, 0)):
            state, _ = step(state, b)
        return state.clone()

    ranks = tx.simulate(one_rank, {"node": 2, "local": 2}, list(range(4)))
    assert not torch.equal(ranks[0].params["a.weight"], start()["a.weight"])
    same(ranks[1:], [ranks[0]] * 3)


def flat(state: Any) -> dict[str, Any]:
    return tx.to_state_dict(state)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*PAIRS, "encoded", "encoded, masters", "feedback"])
def test_the_step_is_the_pure_step(name: str) -> None:
    """Values and states, of all ranks; buckets are those of the pure pipeline."""
    encoded = {
        "encoded": (tx.fuse(tx.compress(tx.int8(), tx.scatter_mean("data")), tx.sgd(0.1, momentum=0.9), gather_codec=tx.int8()), {}),
        "encoded, masters": (
            tx.fuse(tx.scatter_mean("data"), tx.mixed_precision(tx.adamw(0.1)), gather_codec=tx.int8()), {"dtype": torch.bfloat16}
        ),
        "feedback": (
            tx.fuse(
                tx.chain(tx.error_feedback(tx.compress(tx.int8(block=16), tx.scatter_mean("data"))), tx.clip_by_value(1.0)),
                tx.adamw(0.1),
            ), {},
        ),
    }  # fmt: skip
    pipeline, options = encoded.get(name) or (PAIRS[name].sharded, PAIRS[name].options)
    axes = PAIRS[name].axes if name in PAIRS else {}
    sizes, dtype = axes or {"data": 3}, options.get("dtype", torch.float32)

    def pure(rank: int) -> Any:
        params = start(dtype)
        state = pipeline.init(params)
        for i in range(5):
            grads, weight = batch(rank, i, dtype)
            scale = state.scale.to(dtype) if hasattr(state, "scale") else 1.0
            if i >= 5 - rank % 3:
                weight = 0.0
            params, state = pipeline.step(params, {p: g * scale for p, g in grads.items()}, state, weight=weight)
        return pipeline.flush(params, state)

    ranks = 1
    for n in sizes.values():
        ranks *= n
    want = tx.simulate(pure, sizes, list(range(ranks)))
    got = train(pipeline, sizes, bucket_bytes=5 * 2**20, **options)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for one, (params, state) in zip(got, want, strict=True):
        for path, value in params.items():
            torch.testing.assert_close(one.params[path], value, rtol=tolerance, atol=tolerance, msg=path)
        mine, theirs = flat(one.pipeline), flat(state)
        assert mine.keys() >= theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                assert mine[key].shape == value.shape, key
                torch.testing.assert_close(mine[key], value, rtol=tolerance, atol=tolerance, msg=key, check_dtype=False)


WIDE = {"a.weight": (70, 50), "a.bias": (70,), "b.weight": (50, 50), "b.bias": (50,), "big.bias": (1100, 1000)}
COUNTED = {
    "mean": tx.fuse(tx.mean("data"), tx.adamw(0.1)),
    "zero": tx.zero(tx.mean("data"), tx.adamw(0.1), "data"),
    "clip": tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(0.1), "data"),
    "muon": tx.zero(tx.mean("data"), tx.partition({"*.weight": tx.muon(0.1), "*": tx.adamw(0.1)}), "data"),
    "int8": tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.scatter_mean("data"))), tx.adamw(0.1), gather_codec=tx.int8()),
}  # fmt: skip


def sent_bytes(name: str) -> tuple[list[int], int, dict[str, Tensor]]:
    """The bytes that this rank sends to others in each of three steps, counted at torch.distributed."""
    gen = torch.Generator().manual_seed(dist.get_rank())
    step = fjoin.train_step(loss_fn, COUNTED[name], weight=lambda b: b[1])
    state = step.init({path: torch.ones(shape) for path, shape in WIDE.items()})
    seen = []
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
    reference = 0
    for name in COUNTED:
        found = pool.run(ranks, sent_bytes, name)
        what = tx.explain(COUNTED[name], params, {"data": ranks})
        assert found[0][0] == [what.sent_bytes] * 3, name
        for _, _, other in found[1:]:
            assert all(torch.equal(other[path], value) for path, value in found[0][2].items()), name
        total = sum(max(steps) for steps, _, _ in found)
        if name == "mean":
            reference, slots = total, found[0][1]
        elif name in ("zero", "clip"):
            assert total <= reference + 2000 * ranks  # the counts
            assert max(own for _, own, _ in found) <= 1.03 * slots / ranks
        elif name == "int8":
            assert total <= 0.27 * reference


def test_an_error_names_the_parameters_of_all_pieces() -> None:
    """Each rank sees only its piece, but all name the same parameters."""

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(loss_fn, tx.zero(tx.mean("data"), tx.sgd(0.1), "data"), mesh=fjoin.mesh({"data": 3}))
        state = step.init(start())
        grads = batch(rank, 0)
        if rank == 1:
            for path in ("a.weight", "c.weight"):
                grads[0][path].view(-1)[-1] = torch.nan
        with pytest.raises(fjoin.NonFinite) as error:
            step(state, (grads[0], 1.0))
        return error.value.paths

    assert tx.simulate(one_rank, {"data": 3}, [0, 1, 2]) == [("c.weight", "a.weight")] * 3
