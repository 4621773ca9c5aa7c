"""A module whose forward pass reaches its own parts by other objects than nn.Module's attributes: an error."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

X = torch.ones(1, 3)


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
        lambda: fjoin.value_and_grad(lambda p: apply(p, {}, X).sum())(params), lambda: step(step.init(params), X),
    ]  # fmt: skip
    reads = by in READS
    if not reads:  # where a submodule runs, no graph is needed to see it
        calls += [
            lambda: apply(params, {}, X),
            lambda: torch.no_grad()(apply)(params, {}, X),
            lambda: apply.eval()(params, {}, X),
        ]
        calls += [lambda: torch.func.grad(lambda p: apply(p, {}, X).sum())(params)]
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
            lambda call=(apply, params, buffers): call[0].eval()(*call[1:], X.expand(2, 3)),
            type(part).__name__,
        )


def test_given_tensors_may_be_those_of_the_module() -> None:
    module = nn.Linear(3, 3)
    apply, params, _ = fjoin.functional(module)
    own = dict(module.named_parameters())
    assert torch.equal(apply(own, {}, X), module(X)) and torch.equal(apply(params, {}, module(X)), module(module(X)))
