"""A step's own promises: any tree and dtype of parameters, exact weights and sums, ranks without input, equal first parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped
from tests.oracle.whole_batch import make_batches, make_model
from tests.training.small import MEAN_SGD, X, one, start


def test_the_users_sums_travel_with_the_gradients() -> None:
    def one_rank(batches: list[Any]) -> list[Any]:
        apply, params, _ = fjoin.functional(make_model())

        def loss_fn(params: Any, batch: Any) -> Any:
            out = apply(params, {}, batch[0])
            sums = {"right": (out.argmax(1) == batch[1]).sum(), "n": len(batch[1])}
            return torch.nn.functional.cross_entropy(out, batch[1]), {"sum": sums, "own": 7}

        step = fjoin.train_step(loss_fn, MEAN_SGD)
        state, seen = step.init(params), []
        for batch in step.join(batches):
            state, metrics = step(state, batch)
            seen.append((metrics.sums["n"], metrics.sums["right"], metrics.aux and metrics.aux["own"]))
        return seen

    a, b, c = tx.simulate(one_rank, {"data": 3}, make_batches(1, [[3, 2, 4], [5], []]))
    assert [n for n, _, _ in a] == [8, 2, 4] and [s[:2] for s in a] == [s[:2] for s in b] == [s[:2] for s in c]
    assert [own for _, _, own in b] == [7, None, None] and [own for _, _, own in c] == [None] * 3


def test_a_batch_of_weight_zero_is_ignored() -> None:
    """A batch of padding alone: its loss is 0 / 0, and is not looked at; if all have no weight, nothing changes."""

    def one_rank(batch: Tensor, weight: float) -> Any:
        step, state = one(tx.fuse(tx.mean("data"), tx.adamw(0.1)), weight=lambda _: weight)
        state, metrics = step(state, batch)
        return state.params["w"].clone(), metrics.loss, metrics.weight, int(state.pipeline.optimizer["w"].step)

    nan = torch.full((2,), float("nan"), dtype=torch.float64)
    (a, *seen), (b, *others) = tx.simulate(one_rank, {"data": 2}, [X, nan], [2.0, 0.0])
    ((alone, *wanted),) = tx.simulate(one_rank, {"data": 1}, [X], [2.0])
    assert torch.equal(a, b) and torch.equal(a, alone) and seen == others == wanted
    w, loss, weight, steps = one_rank(X, 0.0)
    assert torch.equal(w, start()["w"]) and loss != loss and weight == steps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_are_exact_where_float32_is_not(dtype: torch.dtype) -> None:
    """2^24 + 1 tokens on one rank and 1 on another: their sum is not a float32. Counts never ride in 16 bits either."""

    def one_rank(weight: float) -> Any:
        step = fjoin.train_step(lambda p, b: (p["h"] * b).float().sum(), MEAN_SGD, weight=lambda _: weight)
        state, metrics = step(step.init({"h": torch.ones(4, dtype=dtype)}), torch.ones(4, dtype=dtype))
        return metrics.weight, state.params["h"].clone()

    for weight, h in tx.simulate(one_rank, {"data": 3}, [2.0**24 + 1, 1.0, 2.0**40]):
        assert weight == 2.0**24 + 2 + 2.0**40
        assert torch.allclose(h, torch.full((4,), 0.9, dtype=dtype), rtol=0, atol=2**-8)


# -- parameters ----------------------------------------------------------------------------------------


def test_any_tree_of_parameters() -> None:
    tree = {"b": [torch.ones(2), (torch.ones(1), {"z": torch.tensor(1.0), "a": torch.ones(0, 3)})], "a": torch.ones(1)}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        assert isinstance(params["b"][1], tuple)
        return (params["b"][0] * batch).sum() + params["b"][1][1]["z"] ** 2 + params["a"].sum()

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    state, _ = step(step.init(tree), torch.ones(2))
    assert state.params["b"][1][1]["a"].shape == (0, 3)
    assert torch.equal(state.params["b"][1][0], torch.ones(1) * (1 - 0.1 * 0.01)), "an unused parameter is decayed"
    assert state.pipeline.optimizer["a"].step == 1


def test_no_parameters_at_all() -> None:
    step = fjoin.train_step(lambda p, b: b.sum(), MEAN_SGD)
    state = step.init({})
    raises_text(ValueError, lambda: step(state, torch.ones(1)), "does not depend on params")
    state, metrics = step(state, torch.ones(1, requires_grad=True))
    assert metrics.loss == 1 and state.params == {}


def test_initial_parameters_are_made_equal_or_checked() -> None:
    def one_rank(value: float, sync: Any) -> Any:
        step = fjoin.train_step(lambda p, b: p["w"].sum() * b, MEAN_SGD)
        return step.init({"w": torch.full((3,), value)}, sync=sync).params["w"][0].item()

    for sync, values, want in (
        ("broadcast", [1.0, 2.0], [1.0, 1.0]), (None, [1.0, 2.0], [1.0, 2.0]), ("check", [2.0, 2.0], [2.0, 2.0]),
    ):  # fmt: skip
        assert tx.simulate(one_rank, {"data": 2}, values, [sync] * 2) == want
    raises_text(
        fjoin.DesyncError, lambda: tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], ["check"] * 2),
        "'w' has other values on rank 1 than on rank 0", "broadcast",
    )  # fmt: skip


def reduce_along_one_axis() -> Any:
    """Two groups; one of them has no batch at all and never takes a step."""
    mesh = fjoin.mesh({"node": 2, "local": 2}, timeout_s=20)
    step = fjoin.train_step(
        lambda p, b: ((p["w"] * b).sum(), {"sum": {"n": 1}}), tx.fuse(tx.mean("local"), tx.sgd(1.0)), mesh=mesh
    )
    state = step.init({"w": torch.zeros(2)})
    seen = []
    for batch in step.join([torch.ones(2)] * [3, 1, 0, 0][mesh.rank]):
        state, metrics = step(state, batch)
        seen.append(metrics.sums["n"])
    return seen, state.params["w"].tolist()


def test_groups_along_one_axis_do_not_wait_for_each_other(pool: Any) -> None:
    want = [([2, 1, 1], [-3, -3])] * 2 + [([], [0, 0])] * 2
    assert pool.run(4, reduce_along_one_axis) == want
    assert tx.simulate(reduce_along_one_axis, {"node": 2, "local": 2}) == want


class First(torch.autograd.Function):
    """Returns its first argument, and None as the gradient of the second one."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_a_function_leaves_out_is_zero(accumulate: int, bucket_bytes: int) -> None:
    def one_rank(rank: int) -> Any:
        options = {"bucket_bytes": bucket_bytes, "accumulate": accumulate}
        step = fjoin.train_step(lambda p, x: (First.apply(p["a"], p["b"]) * x).sum(), MEAN_SGD, **options)
        state = step.init({"a": torch.ones(2), "b": torch.ones(2)})
        return stepped(step, state, [torch.full((2,), 1.0 + rank)] * accumulate).params

    for params in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        torch.testing.assert_close(params, {"a": torch.full((2,), 1 - 0.15), "b": torch.ones(2)})
