"""`fjoin.value_and_grad` against torch.func.grad_and_value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin


def params() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(3, 4), "in": [torch.randn(4), torch.randn(())], "unused": torch.randn(2),
        "none": torch.randn(0),
    }  # fmt: skip


def loss_fn(p: Any, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return ((p["w"] @ x).sin() * scale).sum() + (p["in"][0] * p["in"][1]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_match_torch_func(dtype: torch.dtype) -> None:
    p = torch.utils._pytree.tree_map(lambda leaf: leaf.to(dtype), params())
    x = torch.randn(4).to(dtype)
    want, value = torch.func.grad_and_value(loss_fn)(p, x, scale=2.0)
    got, grads = fjoin.value_and_grad(loss_fn)(p, x, scale=2.0)
    torch.testing.assert_close((got, grads), (value, want), rtol=0, atol=0)
    assert not got.requires_grad and (grads["unused"] == 0).all()


def test_nothing_is_written() -> None:
    p = {"w": torch.randn(3, 4, requires_grad=True)}
    with torch.no_grad():  # as jax's, it needs no mode
        (value, aux), grads = fjoin.value_and_grad(
            lambda p: (p["w"].square().sum(), {"w": p["w"] * 2, "n": 3}), has_aux=True
        )(p)
    assert p["w"].grad is None and not aux["w"].requires_grad and aux["n"] == 3
    torch.testing.assert_close(grads["w"], 2 * p["w"].detach())
    assert value.item() == p["w"].square().sum().item()


def test_it_has_the_name_of_the_function() -> None:
    assert fjoin.value_and_grad(loss_fn).__name__ == "loss_fn"
    assert fjoin.value_and_grad(lambda p: torch.tensor(3.0))({})[0] == 3.0
