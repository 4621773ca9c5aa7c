"""The supported training inputs: any tree, dtype, layout, buffers, several axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.layout import make_layout
from tests.helpers import max_diff, raises_text, same_bits, stepped
from tests.oracle.whole_batch import make_batches, make_model, parameters
from tests.reducer.one_rank import train_one_rank


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
    step = fjoin.train_step(lambda p, b: b.sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = step.init({})
    raises_text(ValueError, lambda: step(state, torch.ones(1)), "does not depend on params")
    state, metrics = step(state, torch.ones(1, requires_grad=True))
    assert metrics.loss == 1 and state.params == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_exact_counts(dtype: torch.dtype) -> None:
    """Counts never ride in 16 bits: they are a message of their own, or in a float32 bucket."""

    def one_rank(n: float) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (params["h"] * batch).float().sum()

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.5)), weight=lambda _: n)
        state, metrics = step(step.init({"h": torch.ones(4, dtype=dtype)}), torch.ones(4, dtype=dtype))
        return metrics.weight, state.params["h"].clone()

    (weight, h), (other, _) = tx.simulate(one_rank, {"data": 2}, [2049.0, 1.0])
    assert weight == other == 2050
    assert torch.allclose(h, torch.full((4,), 0.5, dtype=dtype), rtol=0, atol=2**-8)


def test_mixed_dtypes_in_one_model() -> None:
    def one_rank(x: float) -> Any:
        params = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(3, dtype=torch.bfloat16)}

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return sum((p * batch).double().sum() for p in params.values())

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(1.0)))
        state, _ = step(step.init(params), x)
        return {path: p.clone() for path, p in state.params.items()}

    (a, b) = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0])
    assert same_bits(a, b)
    assert all(torch.allclose(p.double(), torch.full((3,), -0.5, dtype=torch.float64)) for p in a.values())


def test_large_tensors_are_sent_without_a_copy() -> None:
    params = {"big": torch.zeros(1100, 1000), "small": torch.zeros(10)}
    layout = make_layout(params, lambda path: 0)
    assert [b.direct for b in layout] == [False, True] or [b.direct for b in layout] == [True, False]

    def one_rank(x: float) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return (params["big"] * batch).sum() / 1000 + params["small"].sum() * batch

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
        state = stepped(step, step.init(params), step.join([x] * int(x)))
        return {path: p.clone() for path, p in state.params.items()}

    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 3.0])
    assert same_bits(a, b) and a["big"].abs().sum() > 0


def test_buffers_are_returned_and_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    apply, params, buffers = fjoin.functional(model)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply.with_buffers(params, buffers, batch[0])
        return torch.nn.functional.cross_entropy(out, batch[1]), None, buffers

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state = step.init(params, buffers)
    reference = torch.optim.SGD(model.parameters(), 0.1)
    for batch in make_batches(0, [[4, 5]], torch.float32)[0]:
        state, _ = step(state, batch)
        reference.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        reference.step()
    assert state.buffers is not None and state.buffers["1.num_batches_tracked"] == 2
    assert max_diff(state.buffers, dict(model.named_buffers())) < 1e-7
    assert max_diff(state.params, parameters(model)) < 1e-6
    assert buffers["1.num_batches_tracked"] == 0


def test_initial_parameters_are_made_equal_or_checked() -> None:
    def one_rank(value: float, sync: Any) -> Any:
        step = fjoin.train_step(lambda p, b: p["w"].sum() * b, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        return step.init({"w": torch.full((3,), value)}, sync=sync).params["w"].clone()

    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], ["broadcast"] * 2)
    assert torch.equal(a, b) and a[0] == 1
    a, b = tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], [None] * 2)
    assert a[0] == 1 and b[0] == 2
    tx.simulate(one_rank, {"data": 2}, [2.0, 2.0], ["check"] * 2)
    raises_text(
        fjoin.DesyncError, lambda: tx.simulate(one_rank, {"data": 2}, [1.0, 2.0], ["check"] * 2),
        "'w' has other values on rank 1 than on rank 0", "broadcast",
    )  # fmt: skip


def test_two_axes_at_once() -> None:
    """mean over both axes of a 2 x 2 mesh is the mean over four ranks; the hook may also go one by one."""
    batches = make_batches(5, [[3, 2], [1], [], [4, 4, 2]])

    def one_rank(mine: Any, hook: tx.Transform) -> Any:
        apply, params, _ = fjoin.functional(make_model())
        step = fjoin.train_step(
            lambda p, b: torch.nn.functional.cross_entropy(apply(p, {}, b[0]), b[1]),
            tx.fuse(hook, tx.adamw(0.01)), mesh=fjoin.mesh({"node": 2, "local": 2}), weight=lambda b: len(b[1]),
        )  # fmt: skip
        state = stepped(step, step.init(params), step.join(mine))
        return {path: p.clone() for path, p in state.params.items()}

    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.01))
    flat = tx.simulate(lambda b: train_one_rank(b, pipeline), {"data": 4}, batches)
    for hook in (tx.mean(("node", "local")), tx.chain(tx.mean("local"), tx.mean("node")), tx.mean(("local", "node"))):
        both = tx.simulate(lambda b: one_rank(b, hook), {"node": 2, "local": 2}, batches)  # noqa: B023
        assert all(max_diff(p, flat[0]["params"]) < 1e-13 for p in both)


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


class _First(torch.autograd.Function):
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
        step = fjoin.train_step(
            lambda p, x: (_First.apply(p["a"], p["b"]) * x).sum(),
            tx.fuse(tx.mean("data"), tx.sgd(0.1)),
            bucket_bytes=bucket_bytes,
            accumulate=accumulate,
        )
        state = step.init({"a": torch.ones(2), "b": torch.ones(2)})
        state = stepped(step, state, [torch.full((2,), 1.0 + rank)] * accumulate)
        return state.params

    for params in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        torch.testing.assert_close(params, {"a": torch.full((2,), 1 - 0.15), "b": torch.ones(2)})
