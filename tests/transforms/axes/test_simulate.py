"""The simulators: their limits, their errors, their agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text


def test_mismatched_collectives_are_named_not_hung() -> None:
    def run(fn: Any, n: int = 3) -> str:
        return raises_text(tx.CollectiveMismatch, lambda: tx.simulate(fn, {"data": n}))

    def other_operation() -> None:
        (tx.pmax if tx.axis_index("data") == 1 else tx.psum)(torch.ones(2), "data")

    text = run(other_operation)
    assert "axis 'data'" in text and "rank 0 calls psum(float32[2])" in text and "rank 1 calls pmax(float32[2])" in text

    def other_shape() -> None:
        tx.psum(torch.ones(3 if tx.axis_index("data") == 2 else 2), "data")

    text = run(other_shape)
    assert "psum(float32[2])" in text and "rank 2 calls psum(float32[3])" in text

    def one_forgets() -> None:
        if tx.axis_index("data") != 1:
            tx.psum(torch.ones(2), "data")

    text = run(one_forgets)
    assert "rank 0 waits in psum(float32[2]) over 'data'" in text and "rank 1 has returned" in text

    def other_source() -> None:
        tx.pbroadcast(torch.ones(1), "data", int(tx.axis_index("data")) % 2)

    text = run(other_source)
    assert "pbroadcast(float32[1], 0)" in text and "pbroadcast(float32[1], 1)" in text


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


def test_lockstep_runs_functions_that_vmap_rejects() -> None:
    def in_place(x: Tensor) -> Tensor:
        buffer = torch.zeros(2)
        buffer[0] = x
        return tx.psum(buffer, "data")

    def branch(x: Tensor) -> Tensor:
        return tx.psum(x * 2 if x > 1 else x, "data")

    xs = [torch.tensor(1.0), torch.tensor(2.0)]
    assert tx.simulate(in_place, {"data": 2}, xs)[0].tolist() == [3.0, 0.0]
    assert tx.simulate(branch, {"data": 2}, xs)[0].item() == 5.0
    for fn in (in_place, branch):
        raises_text(tx.NotVmappable, lambda fn=fn: tx.simulate(fn, {"data": 2}, xs, engine="vmap"), "engine='lockstep'")


def test_vmap_raises_on_unequal_inputs() -> None:
    def run(*args: Any) -> Any:
        return lambda: tx.simulate(lambda x: x, {"data": 2}, *args, engine="vmap")

    raises_text(ValueError, run([torch.ones(2), torch.ones(3)]), "one shape and dtype", "lockstep")
    raises_text(ValueError, run([{"a": 1.0}, {"b": 1.0}]), "one structure", "lockstep")
    raises_text(ValueError, run(["x", "y"]), "equal on all ranks", "lockstep")


def test_host_values_pass_through_vmap() -> None:
    out = tx.simulate(lambda x, k: {"n": k, "x": x * k, "s": "text"}, {"data": 2}, [1.0, 2.0], [3, 3], engine="vmap")
    assert out[1]["n"] == 3 and out[1]["s"] == "text" and out[1]["x"].item() == 6.0


def test_grad_mode_is_inherited_from_the_caller() -> None:
    with torch.no_grad():
        assert tx.simulate(torch.is_grad_enabled, {"data": 2}) == [False, False]
    assert tx.simulate(torch.is_grad_enabled, {"data": 2}) == [True, True]


def test_a_shared_leaf_can_be_trained_through_lockstep_ranks() -> None:
    """func.grad inside each rank, collectives inside the loss."""

    def one_rank(x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: (tx.pmean(w * x, "data") - 1) ** 2)(torch.tensor(2.0, dtype=torch.float64))

    xs = [torch.tensor(v, dtype=torch.float64) for v in (1.0, 2.0, 3.0)]
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (3 * ((sum(w * x for x in xs) / 3) - 1) ** 2).backward()
    assert abs(sum(tx.simulate(one_rank, {"data": 3}, xs)) - w.grad) < 1e-12


def _pure_training(xs: Tensor, weight: Tensor) -> Any:
    pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)), tx.adamw(tx.cosine(0.1, 5)))
    params = {"w": torch.full((4,), 0.5, dtype=xs.dtype), "b": torch.zeros((), dtype=xs.dtype)}

    def loss(params: Any, x: Tensor) -> Tensor:
        return ((x @ params["w"] + params["b"] - 1) ** 2).mean()

    state = pipeline.init(params)
    for x in xs:
        grads = torch.func.grad(loss)(params, x)
        params, state = pipeline.step(params, grads, state, weight=weight)
    return params, state.optimizer


@pytest.mark.sample(3)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 64])
def test_both_engines_train_alike(n: int, dtype: torch.dtype, tolerance: float) -> None:
    g = torch.Generator().manual_seed(n)
    data = [torch.randn(3, 6, 4, generator=g, dtype=torch.float64).to(dtype) for _ in range(n)]
    weights = (
        [torch.tensor(float(r % 3), dtype=torch.float64) for r in range(n)] if n > 1 else [torch.tensor(1.0).double()]
    )
    a = tx.simulate(_pure_training, {"data": n}, data, weights)
    b = tx.simulate(_pure_training, {"data": n}, data, weights, engine="vmap")
    scale = max(v.abs().max().item() for v in a[0][0].values())
    assert max_diff(a[0], b[0]) < tolerance * max(scale, 1.0)
    assert max_diff(a[-1], b[-1]) < tolerance * max(scale, 1.0)


def test_vmap_raises_on_transforms_that_need_lockstep() -> None:
    picky = tx.Transform(lambda p: (), lambda g, s, p=None, **e: (g, s), vmappable=False)
    raises_text(
        tx.NotVmappable,
        lambda: tx.simulate(lambda x: picky.update(x, ())[0], {"data": 2}, [1.0, 2.0], engine="vmap"), "lockstep",
    )  # fmt: skip
    assert tx.simulate(lambda x: picky.update(x, ())[0], {"data": 2}, [1.0, 2.0]) == [1.0, 2.0]


def test_vmap_raises_on_functions_that_read_values() -> None:
    pipeline = tx.zero(tx.mean("data"), tx.sgd(0.1), "data")
    p = {"w": torch.ones(4)}
    state = tx.simulate(lambda: pipeline.init(p), {"data": 2})[0]
    for function, part in [
        (lambda x: pipeline.init(p) and x, "zero(...)"),
        (lambda x: pipeline.step(p, {"w": x}, state)[0]["w"], "zero(...)"),
        (lambda x: x * x.sum().item(), "reads a value"),
        (lambda x: x if x.sum() > 1 else -x, "reads a value"),
    ]:
        run = lambda function=function: tx.simulate(function, {"data": 2}, [torch.ones(4)] * 2, engine="vmap")  # noqa: E731
        raises_text(tx.NotVmappable, run, part, "engine='lockstep'")
    other = lambda: tx.simulate(lambda x: x @ torch.ones(9), {"data": 2}, [torch.ones(4)] * 2, engine="vmap")  # noqa: E731
    with pytest.raises(RuntimeError, match="size|shape"):
        other()


def test_a_step_inside_the_simulator_must_use_its_axes() -> None:
    raises_text(
        ValueError, lambda: tx.simulate(lambda: fjoin.mesh({"rows": 2}), {"data": 2}), "inside simulate", "'data': 2"
    )
    raises_text(ValueError, lambda: tx.simulate(lambda: fjoin.mesh({"data": 3}), {"data": 2}), "does not fit 2 ranks")
    assert tx.simulate(lambda: fjoin.mesh({"data": -1}).rank, {"data": 2}) == [0, 1]


def test_hundreds_of_lockstep_ranks() -> None:
    assert [v.item() for v in tx.simulate(lambda: tx.psum(1, "data"), {"data": 300})] == [300] * 300
