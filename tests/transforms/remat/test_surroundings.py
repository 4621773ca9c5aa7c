"""A second run has the modes, flags and variables of the first, wherever the backward pass is called."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from fjoin.transforms.rematerialization._modes import FLAGS
from tests.transforms.remat.fuzz import SinIsCos, default_dtype

POLICIES: dict[str, Any] = {
    "nothing": None, "dots": policies.dots_saveable, "own": lambda op, *args, **kw: "mul" in str(op),
}  # fmt: skip


class Doubled(TorchDispatchMode):
    """Sines are twice as large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


class Cosine(Tensor):
    """Its sine is a cosine."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.cos if func in (torch.sin, Tensor.sin) else func
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]


class Triple(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 3


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)


@contextlib.contextmanager
def scaled() -> Any:
    token = SCALE.set(3.0)
    try:
        yield
    finally:
        SCALE.reset(token)


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
    "a mode for operations": (Doubled, lambda: waves),
    "torch.device": (lambda: torch.device("cpu"), lambda: lambda x: (x * torch.arange(4)).sin() + torch.ones(4) * x.cos()),
    "another device": (lambda: torch.device("meta"), lambda: lambda x: (x * (2 if torch.empty(0).device.type == "meta" else 3)).sin()),
    "set_default_device": (default_device, lambda: lambda x: (x * torch.arange(4)).sin() + torch.ones(4) * x.cos()),
    "set_default_dtype": (default_dtype, lambda: lambda x: (x * torch.full((4,), 0.3)).sin() * torch.full((4,), 0.7)),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: lambda x: (x @ x.t() @ x).sin()),
    "sdpa_kernel": (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), lambda: attention),
    "a variable of a context": (scaled, lambda: lambda x: (x * SCALE.get()).sin().sin()),
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


def test_functions_of_tensor_subclasses() -> None:
    x = torch.tensor(0.3).as_subclass(Cosine).requires_grad_()  # type: ignore[arg-type]
    want, got = (torch.autograd.grad(f(x), x)[0].as_subclass(Tensor) for f in (waves, tx.remat(waves)))  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_torch_checkpoint_loses_function_modes() -> None:
    x = torch.tensor(0.3)
    chain = lambda x: torch.sin(torch.sin(x))  # noqa: E731
    want = gradient(chain, SinIsCos, x)[1]
    of_torch = gradient(lambda x: checkpoint(chain, x, use_reentrant=False), SinIsCos, x)[1]
    assert round(want.item(), 4) == 0.2413 and round(of_torch.item(), 4) == 0.0861
    assert torch.equal(gradient(tx.remat(chain), SinIsCos, x)[1], want)


def other(value: Any) -> Any:
    """Another value of a flag."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return True, True
    if isinstance(value, dict):
        return {(0, "w"): torch.ones(2)}
    if isinstance(value, int):
        return value + 1
    known = {torch.float32: torch.float64, "highest": "high", "auto": "optimal"}
    return known.get(value, torch._C._TorchFunctionState.SUBCLASSES_DISABLED)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_the_first_run_are_restored_for_the_second(name: str) -> None:
    get, put = FLAGS[name]
    before, seen = get(), queue.SimpleQueue[Any]()

    def f(x: Tensor) -> Tensor:
        seen.put(get())
        return x.sin().sin()

    x, changed = torch.ones(2, requires_grad=True), other(before)
    try:
        put(changed)
        first = get()
        out = tx.remat(f)(x)
        put(before)
        out.sum().backward()
        now = get()
    finally:
        put(before)
    assert str(seen.get()) == str(seen.get()) == str(first) != str(before) == str(now)


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(), "random": random.random, "random.gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()), "numpy.randn": lambda: float(np.random.randn()),
}  # fmt: skip


@pytest.mark.parametrize("transform", ["plain", "grad"])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_all_generators(name: str, transform: str) -> None:
    draw, found = DRAWS[name], []
    for wrap in (lambda f: f, tx.remat):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        f = wrap(lambda x: (x * draw()).sin() * draw())
        x = torch.linspace(0, 1, 4)
        if transform == "grad":
            grad = torch.func.grad(lambda x: f(x).sum())(x)  # noqa: B023
        else:
            grad = gradient(f, contextlib.nullcontext, x)[1]
        found.append((grad, torch.rand(2), random.random(), float(np.random.rand())))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
