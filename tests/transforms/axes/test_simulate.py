"""The simulators: their limits, their errors, their agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text


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


def test_ranks_may_branch_and_write_in_place() -> None:
    def in_place(x: Tensor) -> Tensor:
        buffer = torch.zeros(2)
        buffer[0] = x
        return tx.psum(buffer, "data")

    def branch(x: Tensor) -> Tensor:
        return tx.psum(x * 2 if x > 1 else x, "data")

    xs = [torch.tensor(1.0), torch.tensor(2.0)]
    assert tx.simulate(in_place, {"data": 2}, xs)[0].tolist() == [3.0, 0.0]
    assert tx.simulate(branch, {"data": 2}, xs)[0].item() == 5.0


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


def test_a_step_inside_the_simulator_must_use_its_axes() -> None:
    raises_text(ValueError, lambda: tx.simulate(lambda: fjoin.mesh({"rows": 2}), {"data": 2}), "inside simulate", "'data': 2")  # fmt: skip
    raises_text(ValueError, lambda: tx.simulate(lambda: fjoin.mesh({"data": 3}), {"data": 2}), "does not fit 2 ranks")
    assert tx.simulate(lambda: fjoin.mesh({"data": -1}).rank, {"data": 2}) == [0, 1]


def test_hundreds_of_lockstep_ranks() -> None:
    assert [v.item() for v in tx.simulate(lambda: tx.psum(1, "data"), {"data": 300})] == [300] * 300
