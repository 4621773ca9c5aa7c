"""A module that reaches its own submodules by other objects, or whose forward passes change after `functional`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fjoin

X = torch.ones(1, 3)


@dataclasses.dataclass
class Config:
    layer: nn.Module


class Handler:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        return self.module(x)


class Slotted:
    __slots__ = ("__dict__", "scale")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.scale = module, 1.0


# How a module reaches a submodule: what it keeps, and how it calls that.
BY: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Tensor], Any]]] = {
    "a dataclass": (Config, lambda held, x: held.layer(x)),
    "a namespace": (lambda m: types.SimpleNamespace(layer=m), lambda held, x: held.layer(x)),
    "a deque": (lambda m: collections.deque([m], maxlen=2), lambda held, x: held[0](x)),
    "a weak reference": (weakref.ref, lambda held, x: held()(x)),
    "a weak proxy in a list": (lambda m: [weakref.proxy(m)], lambda held, x: held[0](x)),
    "a callable object": (Handler, lambda held, x: held(x)),
    "a method of an object": (lambda m: Handler(m).__call__, lambda held, x: held(x)),
    "an object with slots": (Slotted, lambda held, x: held.module(x) * held.scale),
    "an object in a list": (lambda m: [Handler(m)], lambda held, x: held[0](x)),
    "a list in an object": (lambda m: types.SimpleNamespace(layers=[m]), lambda held, x: held.layers[0](x)),
    "a default argument": (lambda m: lambda x, m=m: m(x), lambda held, x: held(x)),
    "a keyword": (lambda m: lambda x, *, m=m: m(x), lambda held, x: held(x)),
    "a UserDict": (lambda m: collections.UserDict(a=m), lambda held, x: held["a"](x)),
    "a proxy of a dict": (lambda m: types.MappingProxyType({"a": m}), lambda held, x: held["a"](x)),
    "a wrapped function": (lambda m: functools.wraps(m.forward)(lambda x: x), lambda held, x: held.__wrapped__(x)),
    "a key of a dict": (lambda m: {m: 1}, lambda held, x: next(iter(held))(x)),
    "a cached function": (lambda m: functools.lru_cache(lambda: m), lambda held, x: held()(x)),
}  # fmt: skip


class Reaching(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.held, self.by = BY[by][0](self.layer), by

    def forward(self, x: Tensor) -> Any:
        return BY[self.by][1](self.held, x)


def moved(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: (p + 1).requires_grad_() for path, p in params.items()}


def equal(apply: Any, params: dict[str, Tensor], module: nn.Module) -> None:
    """Whether the results and gradients of an `apply` are those of a module that has these parameters."""
    module.load_state_dict(params)
    want, got = module(X).sum(), apply(params, {}, X).sum()
    torch.testing.assert_close(got, want)
    of_module = torch.autograd.grad(want, list(module.parameters()))
    torch.testing.assert_close(torch.autograd.grad(got, list(params.values())), of_module)


@pytest.mark.parametrize("by", BY)
def test_a_submodule_that_is_reached_by_another_object(by: str) -> None:
    apply, params, _ = fjoin.functional(Reaching(by))
    for _ in range(2):
        equal(apply, moved(params), Reaching(by))


def test_changes_to_an_object_persist_after_a_call() -> None:
    module = Reaching("a callable object")
    apply, params, _ = fjoin.functional(module)
    before = module.held.module
    for _ in range(3):
        apply(params, {}, X)
    assert module.held.calls == 3 and module.held.module is before is module.layer


def test_trainer_that_holds_the_module_is_not_copied() -> None:
    module = Reaching("a dataclass")
    trainer: Any = types.SimpleNamespace(strategy=Handler(module))
    module.trainer = trainer
    apply, params, _ = fjoin.functional(module)
    seen = []
    module.register_forward_hook(lambda module, args, out: seen.append(module.trainer))
    apply(params, {}, X)
    assert seen == [trainer] and trainer.strategy.module is module


@pytest.mark.parametrize("when", ["before functional", "before the first call", "later", "while a graph lives"])
def test_a_forward_pass_that_is_wrapped(when: str) -> None:
    def fresh() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def wrap(module: nn.Sequential) -> nn.Sequential:
        old = module[0].forward
        module[0].forward = lambda x: old(x) * 2  # type: ignore[method-assign]
        return module

    module = fresh()
    if when == "before functional":
        wrap(module)
    apply, params, _ = fjoin.functional(module)
    graph = apply(moved(params), {}, X) if when in ("later", "while a graph lives") else None
    if when == "later":
        graph = None
    if when != "before functional":
        wrap(module)
    equal(apply, moved(params), wrap(fresh()))
    del graph


def test_a_list_of_submodules_that_grows() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
            self.stages: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    module, other = Grows(), Grows()
    apply, params, _ = fjoin.functional(module)
    apply(params, {}, X)
    for one in (module, other):
        one.stages.append(one.layer)
    equal(apply, moved(params), other)


def test_a_hook_that_calls_another_submodule() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.a(x)

    module, other = Two(), Two()
    apply, params, _ = fjoin.functional(module)
    apply(params, {}, X)
    for one in (module, other):
        one.a.register_forward_hook(lambda _, args, out, one=one: one.b(out))
    equal(apply, moved(params), other)


def test_a_child_that_refers_to_its_parent() -> None:
    class Child(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return self.parent().layer(x)

    def make() -> nn.Module:
        module = Reaching("a dataclass")
        module.child = Child()
        module.child.parent = weakref.ref(module)
        module.held = types.SimpleNamespace(layer=module.child)
        return module

    apply, params, _ = fjoin.functional(make_alive := make())
    equal(apply, moved(params), make())
    del make_alive


def test_attributes_in_slots() -> None:
    class Slots(nn.Module):
        __slots__ = ("scale",)

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.scale = nn.Linear(3, 3), 2.0

        def forward(self, x: Tensor) -> Any:
            return self.layer(x) * self.scale

    module, other = Slots(), Slots()
    apply, params, _ = fjoin.functional(module)
    equal(apply, moved(params), other)
    module.scale = other.scale = 3.0
    equal(apply, moved(params), other)


class Recorder:
    """Counts the calls of all layers of a model that it refers to."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model, self.calls = model, 0
        for layer in model:
            layer.register_forward_hook(self.hook)

    def hook(self, *_: Any) -> None:
        self.calls += 1


def test_an_object_that_several_modules_hold_is_copied_once() -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    recorder = Recorder(module)
    apply, params, _ = fjoin.functional(module)
    for calls in (3, 6):
        apply(params, {}, X)
        assert recorder.calls == calls


class Layer(nn.Module):
    def __init__(self, shared: Any, first: bool) -> None:
        super().__init__()
        self.shared, self.first, self.w = shared, first, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.shared.hidden = x * self.w
            return x
        return self.shared.hidden + self.w  # type: ignore[no-any-return]


def test_layers_share_an_object_that_refers_to_the_model() -> None:
    def make() -> nn.Module:
        shared = types.SimpleNamespace()
        shared.model = nn.Sequential(Layer(shared, True), Layer(shared, False))
        return shared.model  # type: ignore[no-any-return]

    apply, params, _ = fjoin.functional(module := make())
    equal(apply, moved(params), make())
    del module


def test_transform_leaves_no_tensors_in_an_object() -> None:
    shared = types.SimpleNamespace()
    shared.model = nn.Sequential(Layer(shared, True), Layer(shared, False))
    apply, params, _ = fjoin.functional(shared.model)
    torch.func.grad(lambda p: apply(p, {}, X).sum())(params)
    assert not hasattr(shared, "hidden")


def test_weak_references_to_methods_and_copies_live_as_long_as_the_call() -> None:
    class Weak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
            self.method, self.keep = weakref.WeakMethod(self.run), Handler(self.layer)
            self.handler = weakref.ref(self.keep)

        def run(self, x: Tensor) -> Any:
            return self.layer(x)

        def forward(self, x: Tensor) -> Any:
            gc.collect()
            return self.method()(self.handler()(x))  # type: ignore[misc]

    apply, params, _ = fjoin.functional(module := Weak())
    equal(apply, moved(params), Weak())
    del module


def test_a_proxy_that_delegates_and_an_object_of_private_slots() -> None:
    class Proxy:
        __slots__ = ("_of",)

        def __init__(self, of: Any) -> None:
            self._of = of

        def __getattr__(self, name: str) -> Any:
            return getattr(self._of, name)

    class Fields:
        __slots__ = ("__dict__", "__fields_set__", "__private")

        def __init__(self, layer: nn.Module) -> None:
            self.layer, self.__fields_set__, self.__private = layer, {"layer"}, 2.0

        def scale(self) -> float:
            return self.__private * len(self.__fields_set__)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
            self.parent, self.fields, self.factor = Proxy(self), Fields(self.layer), 2.0

        def forward(self, x: Tensor) -> Any:
            return self.fields.layer(x) * self.parent.factor * self.fields.scale()

    apply, params, _ = fjoin.functional(module := Root())
    equal(apply, moved(params), Root())
    del module


def test_a_call_leaves_no_tensors_in_cycles() -> None:
    apply, params, _ = fjoin.functional(module := Reaching("a list in an object"))
    given = moved(params)
    held = [weakref.ref(p) for p in given.values()]
    gc.collect()
    gc.disable()
    try:
        apply(given, {}, X)
        del given
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
    del module


def test_a_history_that_grows_is_not_searched_again() -> None:
    class History(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(3, 3), [0.0] * 1000

        def forward(self, x: Tensor) -> Any:
            self.seen.append(1.0)
            return self.layer(x)

    apply, params, _ = fjoin.functional(module := History())
    apply(params, {}, X)
    with mock.patch.object(apply._copies, "_find_special", side_effect=AssertionError):
        for _ in range(3):
            apply(params, {}, X)
    assert len(module.seen) == 1004
