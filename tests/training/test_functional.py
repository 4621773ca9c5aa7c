"""A module as a pure function: values, buffers, modes, paths of shared tensors, warnings; any module. `fjoin.value_and_grad`."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
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
from tests.helpers import max_diff, raises_text, same_bits, warned

THROWS_AWAY = pytest.mark.filterwarnings("ignore:this forward pass has updated buffers")
TOKENS = torch.tensor([0, 1, 2, 3, 4, 0])
ROWS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """An embedding that is the output matrix too, a frozen layer, a batch norm, dropout and plain buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor, *, times: float = 1.0) -> Tensor:
        self.calls = self.calls + 1  # by assignment, not in place
        return self.head(self.drop(self.norm(self.frozen(self.embed(x))))) * self.scale * times


def test_results_match_the_module() -> None:
    module = Tied()
    apply, params, buffers = fjoin.functional(module)
    assert list(params) == ["embed.weight", "norm.weight", "norm.bias"]
    assert set(buffers) == {
        "frozen.weight", "frozen.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "scale", "calls",
    }  # fmt: skip
    assert not any(t.requires_grad for t in [*params.values(), *buffers.values()])
    torch.manual_seed(1)
    out, after = apply.with_buffers(params, buffers, TOKENS, times=3.0)
    torch.manual_seed(1)
    assert torch.equal(out, module(TOKENS, times=3.0))
    frozen = {path: buffers[path] for path in ("frozen.weight", "frozen.bias")}
    assert max_diff(after, {**dict(module.named_buffers()), **frozen}) == 0
    assert after["calls"] == 1 and buffers["calls"] == 0


@THROWS_AWAY
def test_it_is_pure() -> None:
    """Nothing that is given changes, nor the module, also by an error in it; a shared tensor gets one gradient."""
    module = Tied()
    module.drop.eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    apply, params, buffers = fjoin.functional(module)
    versions = [t._version for t in [*params.values(), *buffers.values()]]
    a, b = apply(params, buffers, TOKENS), apply(params, buffers, TOKENS)
    with pytest.raises(IndexError):
        apply(params, buffers, TOKENS + 100)
    assert torch.equal(a, b) and torch.equal(apply(params, buffers, TOKENS), a)
    assert same_bits(dict(module.state_dict()), before)
    assert versions == [t._version for t in [*params.values(), *buffers.values()]]
    assert torch.equal(apply(params, {}, TOKENS), a), "what is missing in buffers has its first value"
    assert not torch.equal(apply({k: p + 1 for k, p in params.items()}, buffers, TOKENS), a)
    got = torch.func.grad(lambda p: apply(p, buffers, TOKENS).square().sum())(params)
    module(TOKENS).square().sum().backward()
    assert max_diff(got, {k: p.grad for k, p in module.named_parameters() if p.requires_grad}) < 1e-4
    held = {k: v.clone() for k, v in {**params, **buffers}.items()}
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    assert same_bits({**params, **buffers}, held), "training the module does not change them"


def test_it_follows_the_mode_of_the_module() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    apply, params, buffers = fjoin.functional(model)
    quiet, loud = apply.eval(), apply.train()
    want = copy.deepcopy(model).eval()(ROWS)
    assert torch.equal(quiet(params, buffers, ROWS), want) and model.training
    model.eval()
    for _ in range(2):
        assert torch.equal(apply(params, buffers, ROWS), want)
        found = fjoin.evaluate(lambda x: {"mean": apply(params, buffers, x).mean()}, [ROWS])
        assert abs(found.means["mean"] - want.mean().item()) < 1e-6
    assert torch.equal(quiet.train().eval()(params, buffers, ROWS), want)
    assert not torch.equal(loud.with_buffers(params, buffers, ROWS)[0], want) and not model.training
    assert not torch.equal(quiet({path: 2 * p for path, p in params.items()}, buffers, ROWS), want)
    model.train()
    with pytest.warns(UserWarning, match="throws away"):
        assert not torch.equal(apply(params, buffers, ROWS), want)
    model[2].eval()
    assert torch.equal(*(apply.with_buffers(params, buffers, ROWS)[0] for _ in range(2))), "one submodule's mode"


def test_attribute_changes_are_shared_with_the_module() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.calls, self.factor, self.log = nn.Parameter(torch.ones(())), 0, 1.0, []  # type: ignore[var-annotated]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x.sum() * self.scale
            self.log.append(self.calls)
            return x * self.scale * self.factor

    model = Counts()
    apply, params, _ = fjoin.functional(model)
    linear = nn.Linear(3, 1)
    linear.register_forward_hook(lambda module, args, out: setattr(module, "seen", out))
    apply_linear, weights, _ = fjoin.functional(linear)
    assert apply_linear(weights, {}, ROWS) is linear.seen
    for i in range(3):
        model.factor = float(i)
        assert torch.equal(apply({"scale": torch.tensor(3.0)}, {}, ROWS), ROWS * 3 * i)
    assert model.calls == 3 and model.log == [1, 2, 3]
    assert torch.equal(model.last, 3 * ROWS.sum()) and model.scale.item() == 1.0


@THROWS_AWAY
def test_it_outlives_its_module() -> None:
    """And keeps no second copy of the parameters."""
    model = Tied()
    apply, params, buffers = fjoin.functional(model)
    gone = weakref.ref(model)
    want = apply.eval()(params, buffers, TOKENS)
    del model
    gc.collect()
    trained = [p for p in apply._shell.parameters() if p.requires_grad]
    assert gone() is None and trained and all(p.is_meta for p in trained)
    for again in (apply, pickle.loads(pickle.dumps(apply)), copy.deepcopy(apply)):
        assert torch.equal(again.eval()(params, buffers, TOKENS), want)


@THROWS_AWAY
def test_paths_of_shared_tensors_and_of_others() -> None:
    model = Tied()
    apply, params, buffers = fjoin.functional(model)
    want = apply.eval()(params, buffers, TOKENS)
    assert torch.equal(apply.eval()(model.state_dict(), {}, TOKENS), want)
    others = {"norm.weight": params["norm.weight"], "norm.bias": params["norm.bias"]}
    assert torch.equal(apply.eval()({"head.weight": params["embed.weight"], **others}, buffers, TOKENS), want)
    raises_text(ValueError, lambda: apply(others, buffers, TOKENS), "params lacks ['embed.weight']")
    more = {**params, "x": params["embed.weight"]}
    raises_text(ValueError, lambda: apply(more, buffers, TOKENS), "['x']", "it has [")
    assert torch.equal(apply.eval()(params, buffers, TOKENS), want), "an error leaves nothing behind"
    model.extra = nn.Linear(2, 2)
    raises_text(ValueError, lambda: apply(params, buffers, TOKENS), "params lacks ['extra.")


# -- updates of buffers that are thrown away ---------------------------------------------------------


def normed(**settings: Any) -> Any:
    return fjoin.functional(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **settings)))


@pytest.mark.parametrize("given", ["none", "all"])
def test_warns_once_about_discarded_buffer_updates(given: str) -> None:
    apply, params, buffers = normed()
    (text,) = warned(lambda: [apply(params, buffers if given == "all" else {}, ROWS) for _ in range(3)], __file__)
    words = (
        "'1.num_batches_tracked'",
        "apply.with_buffers(params, buffers, ...)",
        "step.init(params, buffers)",
        "eval mode",
    )
    assert all(word in text for word in words)


def test_warns_about_an_assignment_and_in_a_train_step() -> None:
    apply, params, _ = fjoin.functional(Tied())
    with pytest.warns(UserWarning, match="'calls'"):
        apply.eval()(params, {}, TOKENS)
    apply, params, _ = normed()
    step = fjoin.train_step(lambda p, b: apply(p, {}, b).square().mean(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    with pytest.warns(UserWarning, match="throws away"):
        step(step.init(params), ROWS)


def test_modules_without_buffer_updates_do_not_warn() -> None:
    """Warnings are errors here."""
    for module in (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout()),
    ):
        apply, params, buffers = fjoin.functional(module)
        apply(params, {}, ROWS)
        apply(params, buffers, ROWS)
        with torch.inference_mode():
            apply(params, buffers, ROWS)
    apply, params, buffers = normed()
    for _ in range(2):
        _, buffers = apply.with_buffers(params, buffers, ROWS)
    assert buffers["1.num_batches_tracked"] == 2


# -- torch's own modules, later layers, checkpoints, threads, compilers, references that a call cannot follow --

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
    "a hook": (hooked, lambda root, x: root.other(x)), "a wrapped forward": (wrapped, lambda root, x: root.layer(x)),
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


# -- fjoin.value_and_grad against torch.func.grad_and_value --


def nested_params() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(3, 4), "in": [torch.randn(4), torch.randn(())], "unused": torch.randn(2),
        "none": torch.randn(0),
    }  # fmt: skip


def sines(p: Any, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return ((p["w"] @ x).sin() * scale).sum() + (p["in"][0] * p["in"][1]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_match_torch_func(dtype: torch.dtype) -> None:
    p = torch.utils._pytree.tree_map(lambda leaf: leaf.to(dtype), nested_params())
    x = torch.randn(4).to(dtype)
    want, value = torch.func.grad_and_value(sines)(p, x, scale=2.0)
    got, grads = fjoin.value_and_grad(sines)(p, x, scale=2.0)
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
    assert fjoin.value_and_grad(sines).__name__ == "sines"
    assert fjoin.value_and_grad(lambda p: torch.tensor(3.0))({})[0] == 3.0
