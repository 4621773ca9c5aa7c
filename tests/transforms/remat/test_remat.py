"""A rematerialised function is the function, under every transform and with every policy."""

from __future__ import annotations

import functools
import itertools
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
from tests.helpers import raises_text

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
    return checkpoint(block, x, w, use_reentrant=False)  # type: ignore[no-any-return]


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


def kept(f: Any) -> int:
    """The bytes of the tensors that the graph keeps, each memory once."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = f(X.clone().requires_grad_(), W.clone().requires_grad_())
    assert out.requires_grad
    return sum(found.values())


def test_policies_keep_less() -> None:
    of = {name: kept(remat(block, name)) for name in POLICIES}
    least = X.nbytes + W.nbytes
    assert of["default"] == of["nothing_saveable"] == least
    assert (
        of["everything_saveable"] == kept(block) > of["dots_saveable"] > of["dots_with_no_batch_dims_saveable"] > least
    )
    assert of["save_only_these_names"] == least + 2 * X.nbytes and of["save_any_names_but_these"] == least + X.nbytes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.seen += 1
        h = F.dropout(self.norm(self.first(x)).relu(), 0.5) * self.seen
        return self.last(h) * scale


def trained(wrap: Callable[[Any], Any], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(seed)
    model, x = Model().double(), X.clone().requires_grad_()
    for _ in range(2):
        wrap(model)(x, scale=2.0).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], list(model.buffers())  # type: ignore[list-item]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "module": tx.remat,
    "dots": lambda model: tx.remat(model, policies.dots_saveable),
    "closure": lambda model: tx.remat(lambda *args, **kwargs: model(*args, **kwargs)),
    "method": lambda model: tx.remat(model.forward),
    "partial": lambda model: tx.remat(functools.partial(type(model).forward, model)),
    "container": lambda model: tx.remat(lambda *args, _held={"models": [model]}, **kwargs: _held["models"][0](*args, **kwargs)),
}  # fmt: skip


@pytest.mark.parametrize("how", WRAPS)
def test_modules_random_numbers_and_buffers(how: str) -> None:
    want, got = trained(lambda model: model), trained(WRAPS[how])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_random_numbers_go_on_as_after_one_run() -> None:
    ends = []
    for wrap in (lambda f: f, tx.remat):
        torch.manual_seed(3)
        x = X.clone().requires_grad_()
        wrap(lambda x: F.dropout(x, 0.5))(x).sum().backward()
        ends.append((x.grad, torch.rand(2)))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_other_random_numbers_without_preserve_rng() -> None:
    torch.manual_seed(3)
    x = torch.ones(1000, requires_grad=True)
    out = tx.remat(lambda x: F.dropout(x, 0.5), preserve_rng_state=False)(x)
    out.sum().backward()
    assert x.grad is not None and not torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_autocast(policy: str) -> None:
    found = []
    for wrap in (lambda f: f, lambda f: tx.remat(f, POLICIES[policy])):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wrapped = wrap(model)(X.float())
            once = torch.autograd.grad(wrapped.square().sum(), model.weight, retain_graph=True)
            # Autocast must not keep a weight that was cast without a graph.
            both = torch.autograd.grad((wrapped + model(X.float()[:1])).square().sum(), model.weight)
        found.append((wrapped.detach(), once, both))
    assert found[0][0].dtype is torch.bfloat16
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=0, atol=0)
    torch.testing.assert_close(found[1][2], found[0][2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("policy", POLICIES)
def test_writes_into_results_that_are_kept(policy: str) -> None:
    def writes(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = h * 3.0
        h += y
        return h.mul_(2.0).tanh()

    for run in (plain, TRANSFORMS["grad"], TRANSFORMS["vmap(grad)"]):
        torch.testing.assert_close(run(remat(writes, policy)), run(writes), rtol=0, atol=0)


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


def test_functional_call() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def of(f: Any) -> Any:
        return func.grad(lambda params: f(params, X).sum())(params)

    def call(params: Any, x: Tensor) -> Tensor:
        return func.functional_call(model, params, (x,))  # type: ignore[no-any-return]

    torch.testing.assert_close(of(tx.remat(call)), of(call), rtol=0, atol=0)
    within = of(
        lambda params, x: func.functional_call(
            nn.Sequential(Inside(model)), {f"0.model.{k}": p for k, p in params.items()}, (x,)
        )
    )
    torch.testing.assert_close(within, of(call), rtol=0, atol=0)


class Inside(nn.Module):
    """Its parameters are replaced by a transform while it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return tx.remat(self.model)(x)  # type: ignore[no-any-return]


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


def test_tensors_that_are_not_reached_are_an_error_under_func() -> None:
    hidden = Hidden(torch.ones(3, dtype=torch.float64, requires_grad=True))
    f = tx.remat(lambda y: (y * hidden.value).sum())
    raises_text(RuntimeError, lambda: func.grad(f)(X), "(3,)", "pass it as an argument")
    assert torch.equal(func.grad(lambda y: tx.remat(torch.mul)(y, hidden.value).sum())(X), torch.ones_like(X))


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "of one's own"])
def test_values_stored_by_the_function_do_not_change(policy: str) -> None:
    class Stores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.tanh(x @ W)
            b = a @ W
            self.seen = [a, b, (b + a).view(-1)]
            return torch.tanh(b + a) @ W + x

    module, x = Stores(), X.clone().requires_grad_()
    out = tx.remat(module, POLICIES[policy])(x)
    stored = list(module.seen)
    before = [value.detach().clone() for value in stored]
    out.sum().backward()
    assert all(a is b for a, b in zip(module.seen, stored, strict=True))
    torch.testing.assert_close([value.detach() for value in stored], before, rtol=0, atol=0)


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


def test_bad_input() -> None:
    x = torch.ones(2, requires_grad=True)
    raises_text(TypeError, lambda: tx.remat(3), "fn")
    raises_text(TypeError, lambda: tx.remat(torch.sin, "dots_saveable"), "policy")
    raises_text(TypeError, lambda: tx.remat(torch.sin, lambda op, *args: 1)(x), "must return a bool")
    raises_text(TypeError, lambda: tx.remat(torch.sin, preserve_rng_state=1), "preserve_rng_state")
    raises_text(TypeError, lambda: policies.save_only_these_names("a", 3), "3")
    raises_text(TypeError, lambda: tx.checkpoint_name(x, ""), "nonempty")
    raises_text(TypeError, lambda: tx.checkpoint_name(3, "x"), "int")
    raises_text(ValueError, lambda: tx.remat(lambda tree: tree["a"].add_(1))({"a": x * 1}), "['a']")
    of_iterator = tx.remat(lambda xs: sum((y.sin() for y in xs), x).sum())
    raises_text(RuntimeError, lambda: of_iterator(y for y in [x * 1, x]).backward(), "did not do the same")
    sizes = itertools.count(2)
    unsteady = tx.remat(lambda x: (x @ torch.ones(2, next(sizes))).sum(), policies.dots_saveable)
    raises_text(RuntimeError, lambda: unsteady(x * 1).backward(), "did not do the same")
