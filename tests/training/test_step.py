"""The step's own promises, on simulated ranks: fused equals unfused, exact weights and sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.oracle.whole_batch import make_batches, make_model, parameters
from tests.reducer.one_rank import train_one_rank, unfused_one_rank
from tests.training.small import X, one, quadratic, start

SIZES = [[3, 2, 4], [5], []]

HOOKS = {
    "mean": lambda: tx.mean("data"), "live": lambda: tx.mean("data", over="live"),
    "world": lambda: tx.mean("data", over="world"), "sum": lambda: tx.sum_over("data"),
    "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)),
    "mean, two stages": lambda: tx.chain(tx.mean("data"), tx.clip_by_value(0.05), tx.clip_by_global_norm(0.1)),
    "clip, mean": lambda: tx.chain(tx.clip_by_value(0.05), tx.mean("data")),
    "by path": lambda: tx.partition({"*.weight": tx.mean("data"), "*": tx.sum_over("data")}),
    "masked": lambda: tx.chain(tx.mean("data"), tx.masked(tx.clip_by_value(0.01), "*.bias")),
    "switched": lambda: tx.switch_after(2, tx.mean("data"), tx.mean("data", over="live")),
    "mean of mean": lambda: tx.chain(tx.skip_if_nonfinite(tx.mean("data")), tx.identity()),
}  # fmt: skip
OPTIMIZERS = {
    "adamw": lambda: tx.adamw(tx.warmup_cosine(0.05, 2, 10), weight_decay=0.1),
    "by path": lambda: tx.partition({"*.bias": tx.sgd(0.1, momentum=0.9), "0.*": tx.frozen(), "*": tx.adam(0.05)}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_fused_equals_unfused(hook: str, optimizer: str, bucket_bytes: int) -> None:
    pipeline = tx.fuse(HOOKS[hook](), OPTIMIZERS[optimizer]())
    batches = make_batches(1, SIZES)
    fused = tx.simulate(lambda b: train_one_rank(b, pipeline, bucket_bytes=bucket_bytes), {"data": 3}, batches)
    plain = tx.simulate(lambda b: unfused_one_rank(b, pipeline), {"data": 3}, batches)
    start = parameters(make_model())
    for a, (params, slots) in zip(fused, plain, strict=True):
        moved = {path: p - start[path] for path, p in a["params"].items()}
        assert max_diff(moved, {path: p - start[path] for path, p in params.items()}) < 1e-13
        assert max_diff(a["optimizer"], slots) < 1e-13


def test_state_matches_the_pure_pipeline() -> None:
    pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(0.1))
    step, state = one(pipeline)
    assert same_bits(state.pipeline, pipeline.init(start()))
    params = {path: p.clone() for path, p in state.params.items()}
    old = pipeline.init(params)
    grads = torch.func.grad(quadratic)(params, X)
    with fjoin.bind(fjoin.mesh({"data": -1})):
        params, new = pipeline.step(params, grads, old)
    state, _ = step(state, X)
    assert max_diff(state.params, params) < 1e-14
    assert max_diff(state.pipeline.optimizer, new.optimizer) < 1e-14


def test_the_users_sums_travel_with_the_gradients() -> None:
    def one_rank(batches: list[Any]) -> list[Any]:
        apply, params, _ = fjoin.functional(make_model())

        def loss_fn(params: Any, batch: Any) -> Any:
            out = apply(params, {}, batch[0])
            right = (out.argmax(1) == batch[1]).sum()
            return torch.nn.functional.cross_entropy(out, batch[1]), {
                "sum": {"right": right, "n": len(batch[1])},
                "own": 7,
            }

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        state, seen = step.init(params), []
        for batch in step.join(batches):
            state, metrics = step(state, batch)
            seen.append((metrics.sums["n"], metrics.sums["right"], metrics.aux and metrics.aux["own"]))
        return seen

    a, b, c = tx.simulate(one_rank, {"data": 3}, make_batches(1, SIZES))
    assert [n for n, _, _ in a] == [8, 2, 4] and [s[:2] for s in a] == [s[:2] for s in b] == [s[:2] for s in c]
    assert [own for _, _, own in b] == [7, None, None] and [own for _, _, own in c] == [None] * 3


def test_any_rank_or_all_ranks_may_have_no_batch() -> None:
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.1))
    for sizes in ([[], [], [2, 3]], [[], []], [[]]):
        results = tx.simulate(lambda b: train_one_rank(b, pipeline), {"data": len(sizes)}, make_batches(0, sizes))
        assert all(r["calls"] == max(len(s) for s in sizes) for r in results)
        assert all(same_bits(r["params"], results[0]["params"]) for r in results)


def test_batch_of_weight_zero_is_ignored() -> None:
    """A batch of padding alone: its loss is 0 / 0, and is not looked at."""

    def one_rank(batch: Tensor, weight: float) -> Any:
        step = fjoin.train_step(quadratic, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=lambda _: weight)
        state, metrics = step(step.init(start()), batch)
        return state.params["w"].clone(), metrics.loss

    nan = torch.full((2,), float("nan"), dtype=torch.float64)
    (a, loss_a), (b, loss_b) = tx.simulate(one_rank, {"data": 2}, [X, nan], [2.0, 0.0])
    ((alone, loss),) = tx.simulate(one_rank, {"data": 1}, [X], [2.0])
    assert torch.equal(a, b) and torch.equal(a, alone) and loss_a == loss_b == loss


def test_all_weights_zero_changes_nothing() -> None:
    step, state = one(tx.fuse(tx.mean("data"), tx.adamw(0.1)), weight=lambda _: 0)
    state, metrics = step(state, X)
    assert same_bits(state.params, start()) and metrics.weight == 0 and metrics.loss != metrics.loss
    assert all(s.step == 0 for s in state.pipeline.optimizer.values())


def test_counts_are_exact_where_float32_is_not() -> None:
    """2^24 + 1 tokens on one rank and 1 on another: their sum is not a float32."""

    def one_rank(weight: float) -> float:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (params["w"] * batch).sum()

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), weight=lambda _: weight)
        _, metrics = step(step.init({"w": torch.ones(1)}), torch.ones(1))
        return metrics.weight

    assert tx.simulate(one_rank, {"data": 3}, [2.0**24 + 1, 1.0, 2.0**40]) == [2.0**24 + 2 + 2.0**40] * 3
