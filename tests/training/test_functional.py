"""A module as a pure function: values, buffers, modes, paths of shared tensors, warnings."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits

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
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            apply(params, buffers if given == "all" else {}, ROWS)
    assert len(seen) == 1 and seen[0].filename == __file__
    for part in (
        "'1.num_batches_tracked'", "apply.with_buffers(params, buffers, ...)", "step.init(params, buffers)",
        "eval mode",
    ):  # fmt: skip
        assert part in str(seen[0].message)


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
