"""A module as a pure function: shared, frozen and buffer tensors, errors, transforms through it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits, stepped

THROWS_AWAY = pytest.mark.filterwarnings("ignore:this forward pass has updated buffers")


class Tied(nn.Module):
    """An embedding that is the output matrix too, a frozen layer, a batch norm and a plain buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor, *, times: float = 1.0) -> Tensor:
        self.calls = self.calls + 1  # by assignment, not in place
        return self.head(self.norm(self.frozen(self.embed(x)))) * self.scale * times


X = torch.tensor([0, 1, 2, 3, 4, 0])


def test_results_match_the_module() -> None:
    module = Tied()
    apply, params, buffers = fjoin.functional(module)
    assert list(params) == ["embed.weight", "norm.weight", "norm.bias"]
    assert set(buffers) == {
        "frozen.weight", "frozen.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "scale", "calls",
    }  # fmt: skip
    assert not any(t.requires_grad for t in [*params.values(), *buffers.values()])
    out, after = apply.with_buffers(params, buffers, X, times=3.0)
    assert torch.equal(out, module(X, times=3.0))
    assert (
        max_diff(after, {**dict(module.named_buffers()), **{k: buffers[k] for k in ("frozen.weight", "frozen.bias")}})
        == 0
    )
    assert after["calls"] == 1 and buffers["calls"] == 0


@THROWS_AWAY
def test_it_is_pure() -> None:
    module = Tied()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    apply, params, buffers = fjoin.functional(module)
    versions = [t._version for t in [*params.values(), *buffers.values()]]
    a, b = apply(params, buffers, X), apply(params, buffers, X)
    assert torch.equal(a, b) and same_bits(dict(module.state_dict()), before)
    assert versions == [t._version for t in [*params.values(), *buffers.values()]]
    assert torch.equal(apply(params, {}, X), a), "what is missing in buffers has its first value"
    assert not torch.equal(apply({k: p + 1 for k, p in params.items()}, buffers, X), a)


@THROWS_AWAY
def test_a_shared_tensor_gets_one_gradient() -> None:
    module = Tied()
    apply, params, buffers = fjoin.functional(module)
    got = torch.func.grad(lambda p: apply(p, buffers, X).square().sum())(params)
    module(X).square().sum().backward()
    assert max_diff(got, {k: p.grad for k, p in module.named_parameters() if p.requires_grad}) < 1e-4


def test_the_values_are_copies() -> None:
    module = nn.BatchNorm1d(3)
    module.bias.requires_grad_(False)
    _, params, buffers = fjoin.functional(module)
    before = {k: v.clone() for k, v in {**params, **buffers}.items()}
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    assert same_bits({**params, **buffers}, before), "training the module changes them not"


def test_an_ensemble_through_vmap() -> None:
    apply, params, _ = fjoin.functional(nn.Linear(3, 2))
    many = {k: torch.stack([p, p * 2]) for k, p in params.items()}
    x = torch.randn(4, 3)
    out = torch.func.vmap(lambda p: apply(p, {}, x))(many)
    assert torch.allclose(out[0], apply(params, {}, x)) and torch.allclose(
        out[1], apply({k: p * 2 for k, p in params.items()}, {}, x)
    )


def test_no_second_copy_of_the_parameters_is_kept() -> None:
    apply, params, _ = fjoin.functional(nn.Linear(3, 2))
    assert all(p.is_meta for p in apply._shell.parameters())
    raises_text(ValueError, lambda: apply({"weight": params["weight"]}, {}, torch.ones(3)), "params lacks ['bias']")
    raises_text(
        ValueError,
        lambda: apply({**params, "other": params["bias"]}, {}, torch.ones(3)),
        "['other']",
        "it has ['weight', 'bias']",
    )
    assert apply(params, {}, torch.ones(3)).shape == (2,), "an error leaves nothing behind"


@THROWS_AWAY
def test_an_error_in_the_module_leaves_it_as_it_was() -> None:
    apply, params, buffers = fjoin.functional(Tied())
    before = apply(params, buffers, X)
    try:
        apply(params, buffers, X + 100)
    except IndexError:
        pass
    assert torch.equal(apply(params, buffers, X), before)


def test_training_with_tied_and_frozen_parameters_and_buffers() -> None:
    def one_rank(x: Tensor) -> Any:
        torch.manual_seed(0)
        apply, params, buffers = fjoin.functional(Tied())

        def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
            out, buffers = apply.with_buffers(params, buffers, batch)
            return nn.functional.cross_entropy(out, batch), None, buffers

        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
        state = step.init(params, buffers)
        frozen = buffers["frozen.weight"].clone()
        state = stepped(step, state, step.join([x] * len(x)))
        assert torch.equal(state.buffers["frozen.weight"], frozen)
        return {k: p.clone() for k, p in state.params.items()}

    a, b = tx.simulate(one_rank, {"data": 2}, [X, X[:3]])
    assert same_bits(a, b)


def normed(**settings: Any) -> Any:
    return fjoin.functional(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **settings)))


ROWS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


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


def test_warns_about_discarded_buffer_assignments() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * self.scale

    apply, params, _ = fjoin.functional(Counts())
    with pytest.warns(UserWarning, match="'calls'"):
        apply(params, {}, ROWS)


def test_a_train_step_that_throws_statistics_away_warns() -> None:
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
