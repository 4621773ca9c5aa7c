"""Collectives by axis name: JAX's meaning, nested, differentiated, mapped; and the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.axes import bind_axes
from fjoin.transforms.pipelines import CountingAxis
from tests.collective_table import DIFFERENTIABLE, DTYPES, OPS, SIZES, inputs
from tests.helpers import max_diff, raises_text, same_bits


@pytest.mark.sample(2)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", list(OPS))
def test_results_match_the_definition(op: str, n: int) -> None:
    call, shape, expected = OPS[op]
    xs = inputs(n, shape(n))
    out = tx.simulate(lambda x: call(x, n), {"data": n}, xs)
    for r in range(n):
        assert torch.equal(out[r], expected(xs, r)), (op, r)


def test_sums_of_booleans_are_counts() -> None:
    x = torch.tensor([[True, False], [False, True]])
    for whole, piece in tx.simulate(lambda: (tx.psum(x, "data"), tx.psum_scatter(x, "data")), {"data": 2}):
        assert whole.tolist() == [[2, 0], [0, 2]] and piece.tolist() in whole.tolist() and piece.dtype is torch.int64


@pytest.mark.parametrize("op", OPS)
def test_one_rank_without_a_simulator(op: str) -> None:
    call, shape, expected = OPS[op]
    (x,) = inputs(1, shape(1))
    with fjoin.bind(fjoin.mesh({"data": -1})):
        out = call(x, 1)
    assert torch.equal(out, expected([x], 0))
    assert out.data_ptr() != x.data_ptr(), "results are new tensors"


def loss_of(out: Tensor, rank: Any) -> Tensor:
    """It weighs elements and ranks apart."""
    return (out**2 * torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)).sum() * (1 + rank)


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradient_matches_the_sum_of_all_outputs(op: str, n: int) -> None:
    call, shape, expected = OPS[op]
    xs = inputs(n, shape(n), seed=1)

    def one_rank(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: loss_of(call(x, n), tx.axis_index("data")))(x)

    got = tx.simulate(one_rank, {"data": n}, xs)
    leaves = [x.clone().requires_grad_() for x in xs]
    sum(loss_of(expected(leaves, r), r) for r in range(n)).backward()
    for r in range(n):
        want = torch.zeros_like(xs[r]) if leaves[r].grad is None else leaves[r].grad
        assert max_diff(got[r], want) < 1e-9, (op, r)


def test_second_derivatives() -> None:
    """d2/dx_r dx_s of (sum x)^3 summed over n ranks is 6 n sum x, for every pair."""

    def one_rank(x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda x: tx.psum(x, "data") ** 3)
        return torch.func.grad(lambda x: inner(x))(x)

    out = tx.simulate(one_rank, {"data": 3}, [torch.tensor(v) for v in (1.0, 2.0, 3.0)])
    assert all(v.item() == 3 * 3 * 6 * 6.0 for v in out)


@pytest.mark.parametrize("op", list(OPS))
def test_collectives_inside_torch_vmap(op: str) -> None:
    """Each rank calls torch.func.vmap over an ensemble of 4."""
    call, shape, expected = OPS[op]
    n = 3
    xs = [torch.stack(inputs(4, shape(n), seed=r)) for r in range(n)]
    out = tx.simulate(lambda x: torch.func.vmap(lambda v: call(v, n))(x), {"data": n}, xs)
    for r in range(n):
        want = torch.stack([expected([x[k] for x in xs], r) for k in range(4)])
        assert torch.equal(out[r], want)


def test_nested_axes_and_tuples() -> None:
    shape = {"node": 2, "local": 3}
    xs = [torch.tensor(float(2**r)) for r in range(6)]

    def run(fn: Any) -> list[Any]:
        return [v.tolist() for v in tx.simulate(fn, shape, xs)]

    assert run(lambda x: tx.psum(x, "local")) == [7.0] * 3 + [56.0] * 3
    assert run(lambda x: tx.psum(x, "node")) == [9.0, 18.0, 36.0] * 2
    assert run(lambda x: tx.psum(x, ("node", "local"))) == run(lambda x: tx.psum(x, ("local", "node"))) == [63.0] * 6
    assert run(lambda x: tx.pmean(x, ("node", "local"))) == [10.5] * 6
    assert run(lambda x: tx.all_gather(x, ("node", "local"))) == [[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]] * 6
    assert run(lambda x: tx.all_gather(x, ("local", "node"))) == [[1.0, 8.0, 2.0, 16.0, 4.0, 32.0]] * 6
    assert run(lambda x: tx.axis_index(("node", "local"))) == list(range(6))
    assert run(lambda x: tx.axis_index(("local", "node"))) == [0, 2, 4, 1, 3, 5]
    scattered = run(lambda x: tx.psum_scatter(x * torch.arange(6.0), ("node", "local")))
    assert scattered == [63.0 * r for r in range(6)]
    back = run(lambda x: tx.all_gather(tx.psum_scatter(x * torch.arange(6.0), ("node", "local")), ("node", "local")))
    assert back == [[63.0 * r for r in range(6)]] * 6


def test_trees_travel_packed() -> None:
    """A tree of any form is sent in one message per dtype."""
    notes: list[Any] = []
    tree = {
        "a": torch.ones(3), "b": [torch.ones(2, 2), torch.ones(())], "c": torch.ones(4, dtype=torch.float64), "d": 1,
    }  # fmt: skip
    with bind_axes({"data": CountingAxis("data", 4, notes, {"data": 4})}):
        tx.psum(tree, "data")
        assert [(m.dtype, m.payload_bytes) for m in notes] == [
            (torch.float32, 32), (torch.float64, 32), (torch.int64, 8),
        ]  # fmt: skip
        notes.clear()
        out = tx.all_gather(tree, "data")
        assert len(notes) == 3 and out["b"][0].shape == (4, 2, 2)
        notes.clear()
        rows, sizes = {"a": torch.ones(6, 5), "b": torch.ones(6)}, {"input_split_sizes": (1, 0, 3, 2)}
        out = tx.all_to_all_single(rows, "data", **sizes, output_split_sizes=(1, 4, 4, 0))
        (m,) = notes
        assert (m.payload_bytes, m.sent_bytes) == (6 * 24, 5 * 24) and out["a"].shape == (9, 5)
    (out, _) = tx.simulate(lambda: tx.psum(tree, "data"), {"data": 2})
    assert same_bits(out, {"a": torch.ones(3) * 2, "b": [torch.ones(2, 2) * 2, torch.ones(()) * 2],
                           "c": torch.ones(4, dtype=torch.float64) * 2, "d": torch.tensor(2)})  # fmt: skip


def test_large_trees_travel_in_several_messages() -> None:
    """A leaf is never split, and a large one travels alone."""
    notes: list[Any] = []
    tree = [torch.full((10**6 * n,), float(n), dtype=dtype) for n, dtype in ((3, torch.float32), (1, torch.float64))]
    tree = [*tree, torch.ones(3 * 10**6), torch.full((7 * 10**6,), 2.0), torch.ones(()), torch.ones(1)]
    with bind_axes({"data": CountingAxis("data", 4, notes, {"data": 4})}):
        tx.psum(tree, "data")
    assert [m.payload_bytes for m in notes] == [12 * 10**6, 8 * 10**6, 12 * 10**6, 28 * 10**6, 8]
    out, _ = tx.simulate(lambda: tx.psum(tree, "data"), {"data": 2})
    assert same_bits(out, [2 * leaf for leaf in tree])


def test_empty_trees_and_tensors() -> None:
    assert tx.simulate(lambda x: tx.psum({}, "data"), {"data": 2}, [0.0, 0.0]) == [{}, {}]
    out = tx.simulate(lambda x: tx.psum((x[:0], x), "data"), {"data": 2}, [torch.ones(3)] * 2)
    assert out[0][0].shape == (0,) and torch.equal(out[1][1], torch.ones(3) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_stay(dtype: torch.dtype) -> None:
    xs = inputs(3, (4,), dtype)
    for op in ("psum", "pmax", "all_gather", "psum_scatter"):
        shape = (3, 2) if op == "psum_scatter" else (4,)
        given = inputs(3, shape, dtype)
        out = tx.simulate(lambda x: OPS[op][0](x, 3), {"data": 3}, given)  # noqa: B023
        assert out[0].dtype == dtype and torch.equal(out[2], OPS[op][2](given, 2))
    flags = tx.simulate(lambda x: tx.psum(x > 3, "data"), {"data": 3}, xs)
    assert flags[0].dtype == torch.int64 and torch.equal(flags[0], sum((x > 3).long() for x in xs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it enters a level
def test_a_derivative_forward_is_refused_and_not_lost() -> None:
    def one_rank(x: torch.Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            return tx.psum(torch.autograd.forward_ad.make_dual(x, x), "data")

    raises_text(NotImplementedError, lambda: tx.simulate(one_rank, {"data": 1}, [torch.ones(2)]), "jvp")


# -- the simulator ------------------------------------------------------------------------------------------------------


def test_an_error_names_its_rank_and_ends_the_simulation() -> None:
    def one_rank() -> None:
        if tx.axis_index("data") == 2:
            raise ValueError("bad")
        tx.psum(torch.ones(1), "data")

    with pytest.raises(ValueError, match="bad") as caught:
        tx.simulate(one_rank, {"data": 3})
    assert "raised on simulated rank 2 of {'data': 3}" in caught.value.__notes__
    assert tx.simulate(lambda: tx.psum(1, "data"), {"data": 2}) == [2, 2], "the next simulation is not disturbed"


def test_each_lockstep_rank_has_its_own_stream_of_random_numbers() -> None:
    """Switching between ranks does not disturb a rank's stream: it is that of the rank alone."""

    def one_rank(seed: int) -> list[float]:
        torch.manual_seed(seed)
        out = []
        for _ in range(3):
            out.append(torch.rand(()).item())
            tx.psum(torch.ones(1), "data")
        return out

    torch.manual_seed(7)
    before = torch.get_rng_state()
    together = tx.simulate(one_rank, {"data": 3}, [1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before), "the caller's stream stays"
    for seed, own in zip((1, 2, 3), together, strict=True):
        assert own == tx.simulate(one_rank, {"data": 1}, [seed])[0]


def test_grad_mode_is_inherited_from_the_caller() -> None:
    with torch.no_grad():
        assert tx.simulate(torch.is_grad_enabled, {"data": 2}) == [False, False]
    assert tx.simulate(torch.is_grad_enabled, {"data": 2}) == [True, True]
