"""Second runs in torch.func, in torch.compile, and of functions that use torch.func or return objects."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text
from tests.transforms.remat.fuzz import Square

pytestmark = pytest.mark.usefixtures("host")
POLICIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dots": {"policy": policies.dots_saveable},
    "zeros": {"policy": lambda op, *args, **kwargs: op is torch.ops.aten.zeros.default},
    "ones": {"policy": lambda op, *args, **kwargs: "new_ones" in str(op) or "aten.ones" in str(op)},
    "clones": {"policy": lambda op, *args, **kwargs: "clone" in str(op) or "empty" in str(op) or "detach" in str(op)},
    "all to the host": {"policy": policies.everything_saveable, "offload": "cpu"},
}
X = torch.linspace(-1, 1, 12).view(3, 4)
W = nn.Parameter(torch.linspace(0.5, 1.5, 4))
COUNT = torch.zeros(4)


def force(x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: (z.sin() * z).sum())(x) * x


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return (x.clone() * 2).mul_(3).sin() * self.count.clone()


COUNTED = Counted()


# Own operations of `remat` are of these kinds too, and must not be counted as the function's.
LIKE_OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x.sin() * torch.zeros(12).numel() + torch.zeros(3, 4),
    "two zeros": lambda x: (x.sin() * torch.zeros(7).numel()) * (torch.zeros(2).numel() + torch.zeros(3, 4)),
    "one_hot": lambda x: F.one_hot(torch.tensor([0, 1, 2]), 4).mul(x).sin(),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2]), x).sin(),
    "scatter_add": lambda x: torch.zeros(3, 4).scatter_add(0, torch.tensor([[0, 1, 2, 0]] * 3), x).sin(),
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 0])).sin(),
    "detach": lambda x: x.detach().sin() * x.detach().clone() * x.sin(),
    "empty": lambda x: x.sin() * torch.empty(5).numel() * torch.empty(3, 4).fill_(2.0),
    "ones": lambda x: x.sin() * torch.ones(4) * torch.ones(3, 1) * x.new_ones(4),
    "writes": COUNTED,
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("transform", ["plain", "grad", "vmap(grad)"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LIKE_OWN)
def test_own_operations_are_not_counted(name: str, policy: str, transform: str) -> None:
    if name == "writes" and transform != "plain":
        pytest.skip("torch.func refuses writes into tensors of a closure")
    found = []
    for wrap in (lambda f: f, lambda f: tx.remat(f, **POLICIES[policy])):
        COUNTED.count.zero_()
        f = wrap(LIKE_OWN[name])
        if transform == "plain":
            x = X.clone().requires_grad_()
            grad = torch.autograd.grad(f(x).sum(), x)[0]
        elif transform == "grad":
            grad = torch.func.grad(lambda x: f(x).sum())(X)  # noqa: B023
        else:
            grad = torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([X, X + 1]))  # noqa: B023
        found.append((grad, COUNTED.count.clone()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# Functions that return what they reach.
RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "parameter": lambda x: (x * W, W), "view of a parameter": lambda x: (x * W, W.view(2, 2)),
    "argument": lambda x: (x * W, x), "tensor": lambda x: (x * W, COUNT), "twice": lambda x: (x * W, W, W),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RETURNS)
def test_functions_that_return_captured_tensors(name: str, policy: str) -> None:
    f, again = RETURNS[name], tx.remat(RETURNS[name], **POLICIES[policy])

    def loss(run: Any) -> Any:
        return lambda x: sum(t.sin().sum() for t in run(x))

    COUNT.zero_()
    torch.testing.assert_close(torch.func.grad(loss(again))(X), torch.func.grad(loss(f))(X), rtol=0, atol=0)
    if name in ("parameter", "twice"):
        results = []
        torch.func.grad(lambda x: results.append(again(x)) or results[-1][0].sum())(X)  # type: ignore[func-returns-value]
        assert results[0][1] is W
    assert not COUNT.requires_grad and COUNT.grad_fn is None


# What a function sees of the graph.
SEES: dict[str, Callable[[Tensor], Tensor]] = {
    "requires_grad": lambda x: x.sin() * 2 if x.requires_grad else x.sin() * 3,
    "of a result": lambda x: x.sin() * 2 if x.cos().requires_grad else x.sin() * 3,
    "grad_fn": lambda x: x.sin() * 2 if x.cos().grad_fn is not None else x.sin() * 3,
    "is_leaf": lambda x: x.sin() * 2 if x.cos().is_leaf else x.sin() * 3,
    "is_grad_enabled": lambda x: x.sin() * 2 if torch.is_grad_enabled() else x.sin() * 3,
}
func = torch.func
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda f: func.jvp(f, (X,), (X,)),
    "vjp": lambda f: (lambda pair: (pair[0], pair[1](X)))(func.vjp(f, X)),
    "vmap": lambda f: func.vmap(f)(X),
    "grad": lambda f: func.grad(lambda x: f(x).sum())(X),
    "grad by another": lambda f: func.grad(lambda w: (f(X) * w).sum())(X),
    "vmap(grad)": lambda f: func.vmap(func.grad(lambda x: f(x).sum()))(X),
    "grad(vmap)": lambda f: func.grad(lambda x: func.vmap(f)(x).sum())(X),
    "jacfwd": lambda f: func.jacfwd(lambda x: f(x).sum())(X),
    "jacrev": lambda f: func.jacrev(lambda x: f(x).sum())(X),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.sample(2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("policy", ["nothing", "dots"])
@pytest.mark.parametrize("name", SEES)
def test_function_sees_the_same_graph_as_without_remat(name: str, policy: str, transform: str) -> None:
    want, got = (TRANSFORMS[transform](f) for f in (SEES[name], tx.remat(SEES[name], **POLICIES[policy])))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


INSIDE: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "grad": lambda: force,
    "vmap": lambda: lambda x: torch.func.vmap(lambda row: row.sin() * row.sum())(x) * x,
    "jacrev": lambda: lambda x: torch.func.jacrev(lambda z: z.sin().sum())(x) * x,
    "dropout": lambda: lambda x: F.dropout(force(x), 0.5) * x,
    "parameter": lambda: lambda x: force(x * W) * W,
    "nested": lambda: lambda x: tx.remat(lambda x: force(x).sin())(x) * x,
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", INSIDE)
def test_torch_func_inside(name: str, policy: str) -> None:
    found = []
    for wrap in (lambda f: f, lambda f: tx.remat(f, **POLICIES[policy])):
        torch.manual_seed(0)
        f, x = wrap(INSIDE[name]()), X.clone().requires_grad_()
        found.append(torch.autograd.grad(f(x).square().sum(), (x, W), allow_unused=True))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_torch_func_inside_takes_what_torch_func_takes() -> None:
    x, norm = X.clone().requires_grad_(), nn.BatchNorm1d(4)
    for f, text in (
        (lambda x: force(x) * Square.apply(x), "must override the setup_context"),  # type: ignore[no-untyped-call]
        (lambda x: norm(x) * force(x), "would mutate a captured Tensor"),
    ):
        raises_text(RuntimeError, lambda: tx.remat(f)(x), text)  # noqa: B023


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_of_a_transposed_value(policy: str) -> None:
    """Random numbers are laid out in the order of memory, which differs below a transform."""
    w = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()

    def linear(x: Tensor) -> Tensor:
        return F.dropout(torch.einsum("ij,jk->ki", x, w).t(), 0.5)

    for run in (linear, tx.remat(linear, **POLICIES[policy])):
        torch.manual_seed(1)
        out, pullback = func.vjp(run, X)
        torch.testing.assert_close((pullback(X)[0] * X).sum(), (out * X).sum())
        torch.testing.assert_close(*func.jvp(run, (X,), (X,)))  # it is linear


# -- results ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Tensor
    more: list[Tensor]
    name: str = "frozen"


class Pair(NamedTuple):
    h: Tensor
    n: int


class Cache:
    """Holds values of layers, as caches of keys do."""

    __slots__ = ("layers", "__dict__")

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def update(self, h: Tensor) -> Cache:
        self.layers[0] = h.sin(), h.cos()
        self.length += 1
        return self


def of(out: Any) -> Tensor:
    """A number that depends on all tensors of a result."""
    if isinstance(out, Frozen):
        return of([out.h, *out.more])
    if isinstance(out, Cache):
        return of([*out.layers[0]])
    if isinstance(out, dict):
        return of(list(out.values()))
    return sum((x.sin().sum() for x in out if isinstance(x, Tensor)), start=torch.zeros(()))


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "frozen dataclass": lambda x: Frozen(x.sin(), [x.cos(), x * 2]),
    "named tuple": lambda x: Pair(x.sin(), 3),
    "object": lambda x: Cache().update(x),
    "others": lambda x: (x.sin(), 3, "text", None, 1.5, torch.float32, {"a": x.cos()}),
    "set": lambda x: (x.sin(), {1, 2}),
    "distribution": lambda x: (torch.distributions.Normal(x.sin(), 1.0).mean, 1),
    "ordered": lambda x: collections.OrderedDict(a=x.sin(), b="text"),
    "max": lambda x: x.sin().max(-1),
    "dataclass of an argument": lambda x: Frozen(x, [x.cos()]),
    "dataclass of a parameter": lambda x: Frozen(x.sin(), [W]),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_results_of_all_kinds(name: str, policy: str) -> None:
    f, again = OUTPUTS[name], tx.remat(OUTPUTS[name], **POLICIES[policy])
    x = X.clone().requires_grad_()
    assert type(again(x)) is type(f(x))
    (want,), (got,) = (torch.autograd.grad(of(run(x)), x) for run in (f, again))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for transform in ("grad", "vmap(grad)", "grad(vmap)"):
        if name in ("others", "set", "named tuple", "max"):
            want, got = (TRANSFORMS[transform](lambda x, run=run: of(run(x)).reshape(1)) for run in (f, again))
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        elif "dataclass" in name or name == "object":
            raises_text(TypeError, lambda t=transform: TRANSFORMS[t](lambda x: of(again(x))), "register the class")


def test_returned_object_keeps_its_identity() -> None:
    cache = Cache()
    assert tx.remat(cache.update)(X.clone().requires_grad_()) is cache and cache.length == 1


def test_iterators_are_no_results_under_func() -> None:
    for f in (lambda x: (y for y in [x * 1]), lambda x: (x, map(abs, [x])), lambda x: {"a": iter([x])}):
        raises_text(TypeError, lambda: torch.func.vmap(tx.remat(f))(X), "return a list")  # noqa: B023


def test_parameters_may_be_stepped_in_the_backward_pass() -> None:
    """Each is stepped when it has its gradient, before the recomputation, which does not need the last bias."""

    def run(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        x = torch.ones(2, 5, 3, requires_grad=True)
        y = wrap(lambda x: block(x).transpose(0, 1) + block[2].bias)(x)

        def step(p: Tensor) -> None:
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]

        for p in block.parameters():
            p.register_post_accumulate_grad_hook(step)
        y.sum().backward()
        return [*(p.detach() for p in block.parameters()), x.grad]  # type: ignore[list-item]

    assert all(map(torch.equal, run(tx.remat), run(lambda f: f)))


def test_an_embedding_that_renormalizes_is_used_twice() -> None:
    def run(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        embed, linear = nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 3)
        f = wrap(lambda i: torch.tanh(linear(embed(i))))
        (f(torch.tensor([1])) + f(torch.tensor([2]))).sum().backward()
        return [embed.weight.detach(), embed.weight.grad, linear.weight.grad]  # type: ignore[list-item]

    assert all(map(torch.equal, run(tx.remat), run(lambda f: f)))


def test_a_tensor_that_is_reached_and_not_used_may_change() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Any:
            return self.two(tx.remat(lambda x: self.one(x).sin())(x))

    module = Model()
    module(X.clone().requires_grad_()).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


# -- torch.compile ------------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """Writes into a buffer that it reads."""

    def __init__(self, write: bool = True) -> None:
        super().__init__()
        self.linear, self._write = nn.Linear(4, 4), write
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.add_(y.detach().mean(0))
        return (y * self.mean).sin()


def compiled(wrap: Callable[[nn.Module], Any] | None) -> tuple[list[float], list[float]]:
    """The gradient and the buffer after a compiled call; of the module itself, and not compiled, without `wrap`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, x = Mean(), X.clone().requires_grad_()
    (torch.compile(wrap(module), backend="aot_eager") if wrap else module)(x).sum().backward()
    assert x.grad is not None
    return [round(v, 5) for v in x.grad.flatten().tolist()], [round(v, 5) for v in module.mean.tolist()]


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_compiled_functions_that_write_into_buffers(policy: str) -> None:
    want = compiled(None)
    assert compiled(lambda module: tx.remat(module, **POLICIES[policy])) == want
    assert compiled(lambda module: tx.remat(lambda x: module(x), **POLICIES[policy])) == want
    assert compiled(lambda module: tx.remat(module.forward, **POLICIES[policy])) == want
    of_argument = tx.remat(lambda module, x: module(x), **POLICIES[policy])
    assert compiled(lambda module: lambda x: of_argument(module, x)) == want


def test_torch_checkpoint_gives_wrong_gradients_if_compiled() -> None:
    want = compiled(None)
    got = compiled(lambda module: lambda x: checkpoint(module, x, use_reentrant=False))
    assert got[1] == want[1] and got[0] != want[0]


def test_functions_without_buffers_are_compiled() -> None:
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    linear = nn.Linear(4, 4)
    run = torch.compile(tx.remat(lambda x: linear(x).sin()), backend="aot_eager", fullgraph=True)
    run(x).sum().backward()
