"""A rematerialised function is the function, under every transform and with every policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies

from .functions import POLICIES, again
from .transformer import Count

# Forward-mode derivatives compile their formulas by torch.jit.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("host")]

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def block(x: Tensor, w: Tensor) -> Tensor:
    """Products of matrices, with a batch and without, and named values."""
    h = tx.checkpoint_name(torch.tanh(x @ w), "h")
    scores = torch.bmm(h.view(1, -1, 3), w.expand(1, 3, 3)).squeeze(0) * 0.5
    return torch.softmax(tx.checkpoint_name((scores @ w.T).view_as(h), "out"), -1) * w.sum() + h


def loss(f: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: f(x, w).square().sum()


def plain(f: Any) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(loss(f)(x, w), (x, w))


def twice(f: Any) -> Any:
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(f)(X, w), w, create_graph=True)
    return torch.autograd.grad(first.square().sum(), w)


def dual(f: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(f(X, torch.autograd.forward_ad.make_dual(W, X[:3]))).tangent


func = torch.func
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "plain": plain, "twice": twice, "forward mode": dual, "grad": lambda f: func.grad(loss(f), (0, 1))(X, W),
    "value_and_grad": lambda f: func.grad_and_value(loss(f), 1)(X, W), "vjp": lambda f: func.vjp(f, X, W)[1](X),
    "jvp": lambda f: func.jvp(f, (X, W), (X, W)), "jacrev": lambda f: func.jacrev(f, (0, 1))(X, W),
    "jacfwd": lambda f: func.jacfwd(f, (0, 1))(X, W), "hessian": lambda f: func.hessian(loss(f), 1)(X, W),
    "jacfwd(jacfwd)": lambda f: func.jacfwd(func.jacfwd(f, 1), 1)(X, W),
    "jacrev(jacrev)": lambda f: func.jacrev(func.jacrev(f, 1), 1)(X, W),
    "vmap(grad)": lambda f: func.vmap(func.grad(loss(f), 1), (0, None))(X[:, None], W),
    "grad(vmap)": lambda f: func.grad(lambda w: func.vmap(loss(f), (0, None))(X[:, None], w).sum())(W),
    "grad(vmap), all mapped": lambda f: func.grad(lambda x: func.vmap(loss(f))(x[:, None], torch.stack([W] * 4)).sum())(X),
    "vmap(vmap(grad))": lambda f: func.vmap(func.vmap(func.grad(loss(f), 1), (0, None)), (None, 0))(X[:, None], torch.stack([W, W + 1])),
    "grad(grad)": lambda f: func.grad(lambda w: func.grad(loss(f), 1)(X, w).square().sum())(W),
    "compile": lambda f: plain(torch.compile(f, backend="aot_eager")),
}  # fmt: skip
ATTEND = nn.MultiheadAttention(3, 1, dtype=torch.float64)  # asks whether query, key and value are one tensor


def same(a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * b.cos() if a is b else a.cos() * b.sin() * 2


# Functions of x and w, some of which have regions of their own, by a function and a policy.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "block": lambda region: block,
    "nested": lambda region: lambda x, w: region(block, "dots")(region(block, "nothing")(x, w), w),
    "host inside": lambda region: lambda x, w: region(lambda h: (h @ w).sin().tanh(), "arguments to the host")(x * 2).exp(),
    # One tensor that is given twice: it is one in plain autograd.
    "twice": lambda region: lambda x, w: region(same, "nothing")(h := x * 1.5, h) @ w,
    "query and value": lambda region: lambda x, w: region(lambda q, k: ATTEND(q, k, q)[0], "dots")(h := x * 1.5, h) @ w,
    "all three": lambda region: lambda x, w: region(lambda q, k: ATTEND(q, q, q)[0] + k, "nothing")(h := x * 1.5, h) @ w,
}  # fmt: skip
GIVEN_TWICE = ("twice", "query and value", "all three")
SLOW = ("compile", "hessian", "grad(vmap)")
CASES = [
    (name, policy, transform)
    for name in FUNCTIONS if name not in GIVEN_TWICE
    for policy in (POLICIES if name == "block" else ("nothing", "dots", "host"))
    for transform in TRANSFORMS if name in ("block", "nested") or transform not in SLOW
]  # fmt: skip
# Derivatives of derivatives, and compiled code, add up in another order.
ROUNDED = ("compile", "twice", "grad(grad)", "jacrev(jacrev)", "jacfwd(jacfwd)", "hessian")


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "policy", "transform"), CASES)
def test_every_transform_with_every_policy(name: str, policy: str, transform: str) -> None:
    run = TRANSFORMS[transform]
    want, got = run(FUNCTIONS[name](lambda f, policy: f)), run(again(FUNCTIONS[name](again), policy))
    close = 0 if name == "block" and transform not in ROUNDED else 1e-13
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


@pytest.mark.parametrize("policy", ["nothing", "dots", "host"])
@pytest.mark.parametrize("name", GIVEN_TWICE)
def test_a_tensor_that_is_given_twice(name: str, policy: str) -> None:
    test_every_transform_with_every_policy(name, policy, "plain")


# Runs of (mm, bmm, tanh) in the backward pass beyond those of the plain function.
AGAIN = {
    "nothing_saveable": (2, 1, 1), "dots": (0, 0, 1), "no batch": (0, 1, 1), "names": (2, 1, 0), "but names": (1, 1, 1),
    "dots and names": (0, 0, 0), "own": (2, 1, 0), "no batch, to the host": (0, 1, 1), "names, some to the host": (1, 1, 0),
    "arguments to the host": (2, 1, 1), "dots to the host": (0, 0, 1), "host": (0, 0, 0),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("transform", ["plain", "grad", "vjp"])
@pytest.mark.parametrize("policy", AGAIN)
def test_saved_values_are_not_recomputed(policy: str, transform: str) -> None:
    counts = []
    for f in (block, again(block, policy)):
        with Count() as count:
            TRANSFORMS[transform](f)
        counts.append(count.of)
    assert tuple(counts[1].get(n, 0) - counts[0].get(n, 0) for n in ("mm", "bmm", "tanh")) == AGAIN[policy]


def test_other_random_numbers_without_preserve_rng() -> None:
    x = torch.ones(1000, requires_grad=True)
    out = tx.remat(lambda x: F.dropout(x, 0.5), preserve_rng_state=False)(x)
    out.sum().backward()
    assert x.grad is not None and not torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("policy", [None, policies.dots_saveable, lambda op, *args, **kwargs: "_to_copy" in str(op)])
def test_autocast(policy: Any) -> None:
    found = []
    for wrap in (lambda f: f, lambda f: tx.remat(f, policy)):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(X.float())  # its casts are kept, and are not part of what a policy counts
            wrapped = wrap(model)(X.float())
            once = torch.autograd.grad(wrapped.square().sum(), model.weight, retain_graph=True)
            # Autocast must not keep a weight that was cast without a graph.
            both = torch.autograd.grad((wrapped + model(X.float()[:1])).square().sum(), model.weight)
        found.append((wrapped.detach(), once, both))
    assert found[0][0].dtype is torch.bfloat16
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=0, atol=0)
    torch.testing.assert_close(found[1][2], found[0][2], rtol=2e-2, atol=2e-2)


def test_trees_numbers_and_results_that_are_arguments() -> None:
    def f(tree: Any, n: int, *, names: Any) -> Any:
        y = tree["a"] * n
        return {"same": tree["b"], "twice": (y, y), "max": y.argmax(), "none": None, **dict.fromkeys(names, y.sum())}

    a, b = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    out = tx.remat(f)({"a": a, "b": b}, 3, names=("s",))
    assert (
        out["same"] is b and out["none"] is None and not out["max"].requires_grad and out["twice"][0] is out["twice"][1]
    )
    (out["twice"][0].sum() + out["same"].sum() + out["s"]).backward()
    assert a.grad is not None and a.grad.tolist() == [6.0] * 3 and b.grad is not None and b.grad.tolist() == [1.0] * 2


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_collectives_inside(policy: str) -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(tx.psum(x @ w, "data")).sum() * tx.axis_index("data")

    def of(f: Any) -> Any:
        return tx.simulate(lambda x: func.grad(f)(W, x), {"data": 3}, [X, X + 1, X - 1])

    torch.testing.assert_close(of(again(f, policy)), of(f), rtol=0, atol=0)


GLOBAL = torch.ones(3, dtype=torch.float64, requires_grad=True)


def test_the_last_layer_does_not_run_again() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x + torch.tanh(x @ w) @ w

    def changes(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = h + x
        h.mul_(2.0)  # after y has been asked for
        return (y + h) @ w

    for function in (f, changes):
        products, grads = [], []
        for run in (function, tx.remat(function)):
            x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
            out = loss(run)(x, w)
            with Count() as count:
                grads.append(torch.autograd.grad(out, (x, w)))
            products.append(count.of["mm"])
        assert products[1] == products[0] + 1
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_results_under_func() -> None:
    """A parameter comes back as itself; a result that nothing uses has no derivative."""
    results: list[Any] = []
    func.grad(lambda x: results.append(tx.remat(lambda x: (x * GLOBAL, GLOBAL, x))(x)) or results[0][0].sum())(X)
    assert results[0][1] is GLOBAL
    unused = tx.remat(lambda x: ((x * 0).sqrt(), x.sin() * 2))
    torch.testing.assert_close(func.grad(lambda x: unused(x)[1].sum())(X), X.cos() * 2)
