"""A second run has the modes for functions and the random numbers of the first, wherever the backward pass is called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.transforms.remat.fuzz import SinIsCos

POLICIES: dict[str, Any] = {
    "nothing": None, "dots": policies.dots_saveable, "own": lambda op, *args, **kw: "mul" in str(op),
}  # fmt: skip


class Triple(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 3


@contextlib.contextmanager
def default_device() -> Any:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


def parametrized() -> Callable[[Tensor], Tensor]:
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Triple())
    return lambda x: linear(linear(x).sin()).sin()


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 1, 3, 4)
    return F.scaled_dot_product_attention(q.sin(), q, q.cos()).view(3, 4)


def waves(x: Tensor) -> Tensor:
    return (x * 1.5).sin().sin() * x


# Name -> what surrounds the forward pass, and what makes a function that depends on it.
AROUND: dict[str, tuple[Callable[[], Any], Callable[[], Callable[[Tensor], Tensor]]]] = {
    "a mode for functions": (SinIsCos, lambda: waves),
    "torch.device": (lambda: torch.device("cpu"), lambda: lambda x: (x * torch.arange(4)).sin() + torch.ones(4) * x.cos()),
    "another device": (lambda: torch.device("meta"), lambda: lambda x: (x * (2 if torch.empty(0).device.type == "meta" else 3)).sin()),
    "set_default_device": (default_device, lambda: lambda x: (x * torch.arange(4)).sin() + torch.ones(4) * x.cos()),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: lambda x: (x @ x.t() @ x).sin()),
    "parametrize.cached": (parametrize.cached, parametrized),
    "no_grad and enable_grad": (torch.enable_grad, lambda: lambda x: x.sin() * 2 if torch.is_grad_enabled() else x.sin()),
}  # fmt: skip


def gradient(run: Callable[[Tensor], Tensor], around: Callable[[], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    with around():
        out = run(x)
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", AROUND)
def test_contexts_around_the_forward_pass_are_restored(name: str, policy: str) -> None:
    around, make = AROUND[name]
    found = []
    for wrap in (lambda f: f, lambda f: tx.remat(f, POLICIES[policy])):
        torch.manual_seed(0)
        found.append(gradient(wrap(make()), around, torch.linspace(-1, 1, 12).view(3, 4)))
    if name == "autocast":  # a documented limit: casts are rounded anew
        torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)
    else:
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_torch_checkpoint_loses_function_modes() -> None:
    x = torch.tensor(0.3)
    chain = lambda x: torch.sin(torch.sin(x))  # noqa: E731
    want = gradient(chain, SinIsCos, x)[1]
    of_torch = gradient(lambda x: checkpoint(chain, x, use_reentrant=False), SinIsCos, x)[1]
    assert round(want.item(), 4) == 0.2413 and round(of_torch.item(), 4) == 0.0861
    assert torch.equal(gradient(tx.remat(chain), SinIsCos, x)[1], want)


class Draws(nn.Module):
    """Draws from torch's generator, or from one of its own."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        draw = lambda: torch.rand((), generator=self.generator)  # noqa: E731
        return (x * draw()).sin() * draw()


@pytest.mark.parametrize("transform", ["plain", "grad"])
@pytest.mark.parametrize("own", [False, True])
def test_random_numbers_of_torch(own: bool, transform: str) -> None:
    found = []
    for wrap in (lambda f: f, tx.remat):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3) if own else None
        f, x = wrap(Draws(generator)), torch.linspace(0, 1, 4)
        if transform == "grad":
            grad = torch.func.grad(lambda x: f(x).sum())(x)  # noqa: B023
        else:
            grad = gradient(f, contextlib.nullcontext, x)[1]
        found.append((grad, torch.rand(2), torch.rand(2, generator=generator)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
