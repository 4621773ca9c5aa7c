"""A rematerialised function is the function, under every transform and with every policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies

from .operations import Mul
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
    "plain": plain,
    "twice": twice,
    "forward mode": dual,
    "grad": lambda f: func.grad(loss(f), (0, 1))(X, W),
    "value_and_grad": lambda f: func.grad_and_value(loss(f), 1)(X, W),
    "vjp": lambda f: func.vjp(f, X, W)[1](X),
    "jvp": lambda f: func.jvp(f, (X, W), (X, W)),
    "jacrev": lambda f: func.jacrev(f, (0, 1))(X, W),
    "jacfwd": lambda f: func.jacfwd(f, (0, 1))(X, W),
    "hessian": lambda f: func.hessian(loss(f), 1)(X, W),
    "jacfwd(jacfwd)": lambda f: func.jacfwd(func.jacfwd(f, 1), 1)(X, W),
    "jacrev(jacrev)": lambda f: func.jacrev(func.jacrev(f, 1), 1)(X, W),
    "vmap(grad)": lambda f: func.vmap(func.grad(loss(f), 1), (0, None))(X[:, None], W),
    "grad(vmap)": lambda f: func.grad(lambda w: func.vmap(loss(f), (0, None))(X[:, None], w).sum())(W),
    "grad(vmap), all mapped": lambda f: func.grad(lambda x: func.vmap(loss(f))(x[:, None], torch.stack([W] * 4)).sum())(X),
    "vmap(vmap(grad))": lambda f: func.vmap(func.vmap(func.grad(loss(f), 1), (0, None)), (None, 0))(X[:, None], torch.stack([W, W + 1])),
    "grad(grad)": lambda f: func.grad(lambda w: func.grad(loss(f), 1)(X, w).square().sum())(W),
    "compile": lambda f: plain(torch.compile(f, backend="aot_eager")),
}  # fmt: skip
POLICIES: dict[str, Any] = {
    "default": None,
    "everything_saveable": policies.everything_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "save_only_these_names": policies.save_only_these_names("h", "out"),
    "save_any_names_but_these": policies.save_any_names_but_these("h"),
    "both": policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("h")),
    "of one's own": lambda op, *args, **kwargs: "tanh" in str(op),
    "offload_dot_with_no_batch_dims": policies.offload_dot_with_no_batch_dims(),
    "save_and_offload_only_these_names": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["h"], names_which_can_be_offloaded=["out"]
    ),
    "nothing, offloaded": policies.nothing_saveable,
    "dots, offloaded": policies.dots_saveable,
    "everything, offloaded": policies.everything_saveable,
}


def remat(f: Any, policy: str) -> Any:
    """The function with a policy; what that offloads waits on the host."""
    return tx.remat(f, POLICIES[policy], offload="cpu" if "offload" in policy else None)


# Derivatives of derivatives, and compiled code, add up in another order.
ROUNDED = ("compile", "twice", "grad(grad)", "jacrev(jacrev)", "jacfwd(jacfwd)", "hessian")


@pytest.mark.sample(6)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_transform_with_every_policy(transform: str, policy: str) -> None:
    run = TRANSFORMS[transform]
    want, got = run(block), run(remat(block, policy))
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-13 if transform in ROUNDED else 0, atol=1e-13 if transform in ROUNDED else 0
        )


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nested(transform: str) -> None:
    def outer(x: Tensor, w: Tensor) -> Tensor:
        return tx.remat(block, policies.dots_saveable)(tx.remat(block)(x, w), w)

    def both(x: Tensor, w: Tensor) -> Tensor:
        return block(block(x, w), w)

    want = TRANSFORMS[transform](both)
    got = TRANSFORMS[transform](tx.remat(outer, policies.save_only_these_names("h")))
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def of_torch(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(block, x, w, use_reentrant=False)


def test_torchs_own_checkpoint_works_under_few_transforms() -> None:
    works = []
    for name, run in TRANSFORMS.items():
        try:
            run(of_torch)
            works.append(name)
        except RuntimeError as error:
            assert "saved tensor hooks" in str(error)
    assert works == ["plain", "twice", "forward mode", "jvp", "jacfwd", "jacfwd(jacfwd)", "compile"]


# Runs of (mm, bmm, tanh) in the backward pass beyond those of the plain function.
AGAIN = {
    "nothing_saveable": (2, 1, 1), "dots_saveable": (0, 0, 1), "dots_with_no_batch_dims_saveable": (0, 1, 1),
    "save_only_these_names": (1, 1, 0), "save_any_names_but_these": (1, 1, 1), "both": (0, 0, 0),
    "of one's own": (2, 1, 0), "offload_dot_with_no_batch_dims": (0, 1, 1),
    "save_and_offload_only_these_names": (1, 1, 0), "nothing, offloaded": (2, 1, 1),
    "dots, offloaded": (0, 0, 1), "everything, offloaded": (0, 0, 0),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("transform", ["plain", "grad", "vjp"])
@pytest.mark.parametrize("policy", AGAIN)
def test_saved_values_are_not_recomputed(policy: str, transform: str) -> None:
    counts = []
    for f in (block, remat(block, policy)):
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


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return Mul.apply(x.sin(), self.weight).tanh()


class Around(nn.Module):
    """Runs a module within a region, to which it is an argument or not."""

    def __init__(self, inner: nn.Module, wrap: Callable[[Any], Any], given: bool) -> None:
        super().__init__()
        self.inner, self._wrap, self._given = inner, wrap, given

    def forward(self, x: Tensor) -> Tensor:
        out = self._wrap(lambda m, x: m(x))(self.inner, x) if self._given else self._wrap(self.inner)(x)
        return (out[0] if isinstance(out, tuple) else out).sin().sum()


INNER: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), "own form": Fused,
    "lstm": lambda: nn.LSTM(3, 3),  # whose weights are in a list, too
}  # fmt: skip


@pytest.mark.parametrize("policy", ["default", "dots_saveable", "everything, offloaded"])
@pytest.mark.parametrize("name", INNER)
def test_parameters_that_functional_call_replaces(name: str, policy: str) -> None:
    inner, moved = INNER[name]().float(), X.float()
    for given in (False, True):
        found = []
        for wrap in (lambda f: f, lambda f: remat(f, policy)):
            model = Around(inner, wrap, given)
            params = {path: p.detach() + 0.5 for path, p in model.named_parameters()}
            of = lambda params, model=model: func.functional_call(model, params, (moved,))  # noqa: E731
            moving = {path: p.clone().requires_grad_() for path, p in params.items()}
            whole = func.grad(lambda params, of=of: tx.remat(of)(params))(params)
            found.append((func.grad(of)(params), whole, torch.autograd.grad(of(moving), list(moving.values()))))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_collectives_inside(policy: str) -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(tx.psum(x @ w, "data")).sum() * tx.axis_index("data")

    def of(f: Any) -> Any:
        return tx.simulate(lambda x: func.grad(f)(W, x), {"data": 3}, [X, X + 1, X - 1])

    torch.testing.assert_close(of(tx.remat(f, POLICIES[policy])), of(f), rtol=0, atol=0)


GLOBAL = torch.ones(3, dtype=torch.float64, requires_grad=True)


class Hidden:
    """Out of reach of a search."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_derivatives_by_tensors_that_are_no_arguments() -> None:
    hidden, x = Hidden(torch.ones(3, dtype=torch.float64, requires_grad=True)), X.clone().requires_grad_()
    middle = x * 2

    def f(y: Tensor) -> Tensor:
        return (y * GLOBAL * hidden.value).sum() + middle.sum()

    GLOBAL.grad = None
    tx.remat(f)(x).backward()
    assert x.grad is not None and GLOBAL.grad is not None and hidden.value.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(X, 3.0))
    torch.testing.assert_close(GLOBAL.grad, X.sum(0))
    torch.testing.assert_close(hidden.value.grad, X.sum(0))


def test_the_last_layer_does_not_run_again() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x + torch.tanh(x @ w) @ w

    def changes(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = h + x
        h.mul_(2.0)  # after y has been asked for
        return (y + h) @ w

    for function, again in ((f, 1), (changes, 1)):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        want = plain(function)
        out = tx.remat(function)(x, w)
        with Count() as count:
            loss(lambda *_: out)(x, w).backward()  # noqa: B023
        plainly = loss(function)(x, w)
        with Count() as own:
            torch.autograd.grad(plainly, (x, w))
        assert count.of["mm"] == own.of["mm"] + again
        torch.testing.assert_close((x.grad, w.grad), want, rtol=0, atol=0)


# What a function sees of the graph.
SEES: dict[str, Callable[[Tensor], Tensor]] = {
    "requires_grad": lambda x: x.sin() * 2 if x.requires_grad else x.sin() * 3,
    "of a result": lambda x: x.sin() * 2 if x.cos().requires_grad else x.sin() * 3,
    "grad_fn": lambda x: x.sin() * 2 if x.cos().grad_fn is not None else x.sin() * 3,
    "is_leaf": lambda x: x.sin() * 2 if x.cos().is_leaf else x.sin() * 3,
    "is_grad_enabled": lambda x: x.sin() * 2 if torch.is_grad_enabled() else x.sin() * 3,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name not in ("compile", "hessian", "grad(vmap)")])
@pytest.mark.parametrize("policy", ["default", "dots_saveable"])
@pytest.mark.parametrize("name", SEES)
def test_a_function_sees_the_same_graph(name: str, policy: str, transform: str) -> None:
    run, sees = TRANSFORMS[transform], SEES[name]

    def f(x: Tensor, w: Tensor) -> Tensor:
        return sees(x) @ sees(w)

    torch.testing.assert_close(run(remat(f, policy)), run(f), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("policy", ["default", "dots_saveable", "everything, offloaded"])
def test_one_tensor_given_twice_stays_one(policy: str) -> None:
    def same(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() * b.cos() if a is b else a.cos() * b.sin() * 2

    def gradient(fn: Callable[..., Tensor]) -> Tensor:
        x = torch.linspace(-1.0, 1.0, 24).view(6, 1, 4).requires_grad_()
        h = x * 1.5
        return torch.autograd.grad(fn(h, h).square().sum(), x)[0]

    attend = nn.MultiheadAttention(4, 2)  # asks whether query, key and value are one tensor
    for fn in (same, lambda q, k: attend(q, k, q)[0], lambda q, k: attend(q, q, q)[0] + k):
        assert torch.equal(gradient(remat(fn, policy)), gradient(fn))


@pytest.mark.parametrize("policy", ["default", "dots_saveable", "everything, offloaded"])
def test_a_block_that_offloads_inside_another(policy: str) -> None:
    inner = tx.remat(lambda h, w: (h @ w).sin().tanh(), offload="cpu")
    got = plain(remat(lambda x, w: inner(x * 2, w).exp(), policy))
    torch.testing.assert_close(got, plain(lambda x, w: (x * 2 @ w).sin().tanh().exp()), rtol=0, atol=0)


def test_results_under_func() -> None:
    """A parameter comes back as itself; a result that nothing uses has no derivative."""
    results: list[Any] = []
    func.grad(lambda x: results.append(tx.remat(lambda x: (x * GLOBAL, GLOBAL, x))(x)) or results[0][0].sum())(X)
    assert results[0][1] is GLOBAL
    unused = tx.remat(lambda x: ((x * 0).sqrt(), x.sin() * 2))
    torch.testing.assert_close(func.grad(lambda x: unused(x)[1].sum())(X), X.cos() * 2)


def test_dropout_of_a_transposed_value() -> None:
    """Random numbers are laid out in the order of memory, which differs below a transform."""

    def linear(x: Tensor) -> Tensor:
        return F.dropout(torch.einsum("ij,jk->ki", x, W).t(), 0.5)

    for run in (linear, tx.remat(linear), remat(linear, "dots_saveable")):
        torch.manual_seed(1)
        out, pullback = func.vjp(run, X)
        torch.testing.assert_close((pullback(X)[0] * X).sum(), (out * X).sum())
        torch.testing.assert_close(*func.jvp(run, (X,), (X,)))  # it is linear
