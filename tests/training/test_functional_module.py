"""A pure function of any module: torch's own, later layers, checkpoints, threads, compilers, references that a call cannot follow."""

from __future__ import annotations

import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.training.test_functional import TOKENS, Tied

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def net(*inside: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *inside, nn.Linear(8, 1))


def leaves_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: p.clone().requires_grad_() for path, p in params.items()}


def test_later_layers_and_hooks_take_effect() -> None:
    model = net(nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    apply, params, _ = fjoin.functional(model)
    want = apply(params, {}, X)
    seen: list[str] = []

    class Loud(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append("layer")
            return super().forward(x)

    model[2] = Loud(8, 8)
    model[0].register_forward_hook(lambda module, args, out: seen.append("hook"))
    assert torch.equal(apply(params, {}, X), want) and seen == ["hook", "layer"]
    fjoin.apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.Linear))
    leaves = leaves_of(params)
    apply(leaves, {}, X).sum().backward()
    grads = torch.func.grad(lambda p: apply(p, {}, X).sum())(params)
    assert max_diff({path: p.grad for path, p in leaves.items()}, grads) < 1e-6
    model[2] = nn.Sequential(model[2])
    raises_text(ValueError, lambda: apply(params, {}, X), "params lacks ['2.0.weight']")


HOW = ("closure", "method", "call")


class Checkpointed(nn.Module):
    """Calls torch.utils.checkpoint as libraries do: of a closure, of a bound method, of a submodule through a partial."""

    def __init__(self, how: str, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.how = how
        again = functools.partial(checkpoint, use_reentrant=reentrant)
        self.run: Callable[..., Tensor] = again if how in HOW else lambda function, *args: function(*args)

    def block(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.tanh(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if "closure" in self.how:
            x = self.run(lambda h: torch.relu(self.b(torch.tanh(self.a(h)))), x)
        elif "method" in self.how:
            x = self.run(self.block, x)
        else:
            x = self.run(self.b.__call__, self.run(self.a, x))
        return x.square()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_checkpoints_inside_the_module(how: str, reentrant: bool) -> None:
    """Two forward passes with other parameters before the backward pass; torch's functional_call is silently wrong there."""

    def loss(apply: Any, params: Any) -> Tensor:
        other = {path: 1.5 * p for path, p in params.items()}
        return apply(params, {}, X).sum() + apply(other, {}, 2 * X).sum()

    apply, params, _ = fjoin.functional(Checkpointed(how, reentrant))
    plain, _, _ = fjoin.functional(Checkpointed(f"plain {how}"))
    want = torch.func.grad(lambda p: loss(plain, p))(params)
    for _ in range(2):
        leaves = leaves_of(params)
        loss(apply, leaves).backward()
        assert max_diff({path: p.grad for path, p in leaves.items()}, want) < 1e-6
    if not reentrant:
        assert max_diff(fjoin.value_and_grad(lambda p: loss(apply, p))(params)[1], want) < 1e-6
    step = fjoin.train_step(lambda p, x: apply(p, {}, x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    state, _ = step(step.init(params), X)
    expected = torch.func.grad(lambda p: plain(p, {}, X).sum())(params)
    assert max_diff(state.params, {path: p - 0.1 * expected[path] for path, p in params.items()}) < 1e-6


def test_a_call_leaves_no_tensors() -> None:
    """Not even in cycles, which the garbage collector would have to find."""
    apply, params, _ = fjoin.functional(model := net(nn.Tanh()))
    given = leaves_of(params)
    alive = [weakref.ref(p) for p in given.values()]
    gc.collect()
    gc.disable()
    try:
        apply(given, {}, X)
        del given
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
    del model


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "lstm": lambda: (nn.LSTM(4, 3, 2, bidirectional=True), X),
    "gru": lambda: (nn.GRU(4, 3), X), "transformer": lambda: (nn.TransformerEncoderLayer(4, 2, 8, 0.0), X),
    "weight_norm": lambda: (nn.utils.weight_norm(nn.Linear(4, 3)), X),
    "parametrized": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), X),
    "spectral_norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), X),
    "pruned": lambda: (prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5), X),
    "one in two places": lambda: (nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Sequential(nn.Tanh())), X),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(weight_norm|torch.jit.script|is deprecated)")
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("name", MODULES)
def test_results_match_torch_functional_call(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODULES[name]()
    apply, params, buffers = fjoin.functional(model)
    other = {path: 0.5 * p + 0.1 for path, p in params.items()}

    def first(out: Any) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    for given in (params, other):
        want = first(torch.func.functional_call(model, {**given, **buffers}, (x,)))
        assert torch.allclose(first(apply(given, buffers, x)), want, atol=1e-6)
    _, grads = fjoin.value_and_grad(lambda p: first(apply(p, buffers, x)).square().sum())(other)
    moved = torch.func.grad(lambda p: first(apply(p, buffers, x)).square().sum())(other)
    assert max_diff(grads, moved) < 1e-4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_module_is_refused() -> None:
    """Torch's functional_call raises too."""
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 3)))
    raises_text(TypeError, lambda: fjoin.functional(scripted), "torch.jit")


class Summed(nn.Module):
    """Which communicates between its two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return tx.psum(tx.psum(x * self.a, "data") * self.b, "data")


def test_simulated_ranks_and_threads_share_it() -> None:
    apply, _, _ = fjoin.functional(Summed())
    given = [{"a": torch.tensor([r + 1.0]), "b": torch.tensor([10.0 ** (r + 1)])} for r in range(2)]
    assert tx.simulate(lambda p: apply(p, {}, torch.ones(1)).item(), {"data": 2}, given) == [330.0, 330.0]
    apply, params, _ = fjoin.functional(net(nn.Tanh(), nn.Linear(8, 8)))
    wrong: list[int] = []

    def run(i: int) -> None:
        given = {path: p * i for path, p in params.items()}
        want = apply(given, {}, X)
        wrong.extend(i for _ in range(50) if not torch.equal(apply(given, {}, X), want))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_losses_with_tied_weights() -> None:
    model = Tied().eval()
    apply, params, buffers = fjoin.functional(model)
    compiled: Any = torch.compile(lambda p: apply.with_buffers(p, buffers, TOKENS), backend="aot_eager", fullgraph=True)
    for factor in (1.0, 2.0):
        given = {path: factor * p for path, p in params.items()}
        (out, after), (want, expected) = compiled(given), apply.with_buffers(given, buffers, TOKENS)
        assert torch.allclose(out, want) and after["calls"] == expected["calls"] == 1
    assert buffers["calls"] == 0 and model.calls == 0
    model.train()
    quiet = apply.eval()
    assert not torch.equal(compiled(params)[0], quiet.with_buffers(params, buffers, TOKENS)[0])
    in_eval: Any = torch.compile(
        lambda p: quiet.with_buffers(p, buffers, TOKENS)[0], backend="aot_eager", fullgraph=True
    )
    assert torch.allclose(in_eval(params), quiet.with_buffers(params, buffers, TOKENS)[0])
    torch._dynamo.reset()


def test_a_compiled_module_stays_compiled() -> None:
    frames: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph

    for compile_ in (lambda m: m.compile(backend=backend) or m, lambda m: torch.compile(m, backend=backend)):
        torch._dynamo.reset()
        model = compile_(Checkpointed("plain method"))
        apply, params, _ = fjoin.functional(model)
        frames.clear()
        for factor in (1.0, 2.0):
            given = {path: factor * p for path, p in params.items()}
            assert torch.allclose(apply(given, {}, X), torch.func.functional_call(model, given, (X,)))
        assert frames
    torch._dynamo.reset()


# -- a forward pass that reaches its own parts by other objects than nn.Module's attributes: an error ------

ONES = torch.ones(1, 3)


class Handler:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)


def hooked(root: nn.Module) -> None:
    root.other.register_forward_hook(lambda _, args, out: root.layer(out))


def wrapped(root: nn.Module) -> None:
    old = root.layer.forward
    root.layer.forward = lambda x: old(x) * 2  # type: ignore[method-assign]


# How a module reaches a submodule: what it keeps, and how it calls that.
BY: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "a list": (lambda root: [root.layer], lambda root, x: root.held[0](x)),
    "a dict": (lambda root: {"a": root.layer}, lambda root, x: root.held["a"](x)),
    "an object": (lambda root: types.SimpleNamespace(layer=root.layer), lambda root, x: root.held.layer(x)),
    "a callable object": (lambda root: Handler(root.layer), lambda root, x: root.held(x)),
    "a closure": (lambda root: lambda x, layer=root.layer: layer(x), lambda root, x: root.held(x)),
    "a bound method": (lambda root: root.run, lambda root, x: root.held(x)),
    "a partial": (lambda root: functools.partial(root.run), lambda root, x: root.held(x)),
    "a weak reference": (lambda root: weakref.ref(root.layer), lambda root, x: root.held()(x)),
    "a list of parameters": (lambda root: [root.layer.weight], lambda root, x: x @ root.held[0]),
    "a view of a parameter": (lambda root: root.layer.weight.view(3, 3), lambda root, x: x.sum() * root.held),
    "a hook": (hooked, lambda root, x: root.other(x)),
    "a wrapped forward": (wrapped, lambda root, x: root.layer(x)),
}  # fmt: skip

READS = ("a list of parameters", "a view of a parameter", "a wrapped forward")  # which run no submodule


class Root(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.layer, self.other, self.by = nn.Linear(3, 3), nn.Linear(3, 3), by
        self.held = BY[by][0](self)

    def run(self, x: Tensor) -> Any:
        return self.layer(x)

    def forward(self, x: Tensor) -> Any:
        return BY[self.by][1](self, x) + self.other(x)


@pytest.mark.parametrize("by", BY)
def test_a_submodule_that_is_reached_by_another_object(by: str) -> None:
    apply, params, _ = fjoin.functional(module := Root(by))
    step = fjoin.train_step(lambda p, x: apply(p, {}, x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    calls: list[Callable[[], Any]] = [
        lambda: fjoin.value_and_grad(lambda p: apply(p, {}, ONES).sum())(params), lambda: step(step.init(params), ONES),
        lambda: apply(params, {}, ONES), lambda: torch.no_grad()(apply)(params, {}, ONES),
        lambda: apply.eval()(params, {}, ONES), lambda: torch.func.grad(lambda p: apply(p, {}, ONES).sum())(params),
    ]  # fmt: skip
    reads = by in READS
    if reads:  # also where what is kept outlives the module
        calls += [lambda: fjoin.functional(Root(by))[0].eval()(params, {}, ONES)]
    for call in calls:
        raises_text(
            ValueError, call, "of the module itself", "nn.ModuleList", "self.name", *(["'layer.weight'"] * reads)
        )
    del module


def test_parts_without_trained_parameters_are_found_too() -> None:
    for part in (nn.Dropout(), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3).requires_grad_(False)):
        module = Root("a list")
        module.layer, module.held = part, [part]
        apply, params, buffers = fjoin.functional(module)
        raises_text(
            ValueError,
            lambda call=(apply, params, buffers): call[0].eval()(*call[1:], ONES.expand(2, 3)),
            type(part).__name__,
        )


def test_given_tensors_may_be_those_of_the_module() -> None:
    module = nn.Linear(3, 3)
    apply, params, _ = fjoin.functional(module)
    own = dict(module.named_parameters())
    assert torch.equal(apply(own, {}, ONES), module(ONES)) and torch.equal(
        apply(params, {}, module(ONES)), module(module(ONES))
    )
