"""Arguments of functions in remat: one tensor given twice, reads that look like writes, places where they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies

pytestmark = pytest.mark.usefixtures("host")
POLICIES = [policies.nothing_saveable, policies.dots_saveable, policies.everything_saveable]


def gradient(fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a loss whose argument of `fn` is the result of an operation."""
    x = torch.linspace(-1.0, 1.0, 24).view(6, 1, 4).requires_grad_()
    fn(x * 1.5).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("policy", POLICIES)
def test_one_tensor_given_twice_stays_one(policy: Any) -> None:
    def same(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() * b.cos() if a is b else a.cos() * b.sin() * 2

    attend = nn.MultiheadAttention(4, 2)  # asks whether query, key and value are one tensor
    for fn in (same, lambda q, k: attend(q, k, q)[0], lambda q, k: attend(q, q, q)[0] + k):
        again = tx.remat(fn, policy)
        assert torch.equal(gradient(lambda h, f=again: f(h, h)), gradient(lambda h, f=fn: f(h, h)))  # type: ignore[misc]
    wrapped = fjoin.checkpoint_wrapper(attend, policy=policy)
    assert torch.equal(gradient(lambda h: wrapped(h, h, h)[0]), gradient(lambda h: attend(h, h, h)[0]))


def by_inner(x: Tensor) -> Tensor:
    y = x.detach()
    y.requires_grad = True
    return x * torch.autograd.grad(y.pow(3).sum(), y)[0]


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "is_leaf": lambda x: x.sin() if x.is_leaf else x.cos().exp(), "numpy": lambda x: x * float(x.detach().numpy().max()),
    "data_ptr": lambda x: x.sin() + 0 * (x.data_ptr() % 2), "requires_grad": by_inner,
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads_are_no_writes(name: str) -> None:
    fn = READS[name]
    assert torch.equal(gradient(tx.remat(fn)), gradient(fn))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_offloads_inside_another(policy: Any) -> None:
    inner = tx.remat(lambda h: h.sin().tanh(), offload="cpu")
    got = gradient(tx.remat(lambda h: inner(h).exp(), policy))
    want = gradient(lambda h: h.sin().tanh().exp())
    torch.testing.assert_close(got, want, rtol=0, atol=0)
