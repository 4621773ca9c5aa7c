"""What calls, second runs and plans leave in the objects that a function reaches."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text

from .fuzz import AROUND, OPS, POLICIES, RESULTS, Case
from .test_fuzz import check

pytestmark = pytest.mark.usefixtures("host")
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
MODES = ("plain", "twice", "grad", "rows")


@pytest.mark.sample(24)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPS)
def test_each_operation_alone(name: str, policy: str, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(Case((name, "sin", name), "tensor", policy, "remat", mode, "nothing"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("around", [name for name in AROUND if name != "autocast"])
@pytest.mark.parametrize("result", RESULTS)
def test_each_result(result: str, around: str) -> None:
    for mode in MODES:
        for policy in ("nothing", "own"):
            assert check(Case(("linear", "sin"), result, policy, "remat", mode, around)) == "same"


class Table(dict[str, Any]):
    """A dict whose own methods do more."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("a function may use it only by update")


class Slots:
    __slots__ = ("count", "extra")

    def __init__(self) -> None:
        self.count = 0


class Class:
    total = 0
    mean = torch.zeros(())


def _attribute(where: Any) -> None:
    where.new = where.__dict__.get("new", 0) + 1


def _slot(where: Slots) -> None:
    where.count += 1
    where.extra = "set"


def _class(where: Class) -> None:
    Class.total += 1
    Class.mean += 1


def _hooked(module: nn.Module) -> nn.Module:
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    module.count = lambda: len(seen)
    return module


# Kinds of places -> a new one, and what leaves something in it.
PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda where: where.append(1)),
    "list of lists": (lambda: [[]], lambda where: where[0].append(1)),
    "dict": (dict, lambda where: where.update(n=where.get("n", 0) + 1)),
    "dict without a key": (lambda: {"a": 1}, lambda where: where.pop("a", None)),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda where: where.move_to_end("a")),
    "defaultdict": (lambda: defaultdict(int), lambda where: where.__setitem__("n", where["n"] + 1)),
    "dict of a class": (Table, lambda where: where.update(n=where.get("n", 0) + 1)),
    "set": (set, lambda where: where.add(len(where))),
    "deque": (lambda: deque(maxlen=3), lambda where: where.append(len(where))),
    "attribute": (Class, _attribute),
    "attribute of a module": (nn.Identity, _attribute),
    "slot": (Slots, _slot),
    "class": (Class, _class),
    "training": (lambda: nn.Sequential(nn.Dropout()), lambda where: where.train(not where.training)),
    "buffer": (lambda: nn.BatchNorm1d(2), lambda where: where.num_batches_tracked.add_(1)),
    "buffer, anew": (lambda: nn.BatchNorm1d(2), lambda where: setattr(where, "running_mean", where.running_mean + 1)),
    "parameter": (lambda: nn.Linear(2, 2), lambda where: where.weight.data.mul_(0.5)),
    "hook of a module": (nn.Identity, lambda where: where.register_forward_hook(print)),
    "hook's own list": (lambda: _hooked(nn.Identity()), lambda where: where(torch.zeros(()))),
    "submodule": (nn.Sequential, lambda where: where.append(nn.Identity())),
    "generator of Python": (lambda: random.Random(1), lambda where: where.random()),
    "generator of numpy": (lambda: np.random.default_rng(1), lambda where: where.random()),
    "old generator of numpy": (lambda: np.random.RandomState(1), lambda where: where.rand()),
}  # fmt: skip


def words(where: Any) -> str:
    """The contents of a place."""
    if isinstance(where, Slots):
        return f"{where.count} {getattr(where, 'extra', 'none')}"
    if isinstance(where, nn.Module):
        count = where.__dict__.get("count", lambda: 0)()
        left = where.__dict__.get("new"), len(where._forward_hooks), len(list(where.children())), count
        return f"{where.state_dict()} {where.training} {left}"
    if isinstance(where, GENERATORS):
        return str(drawn(where))
    return (
        f"{where} {Class.total} {Class.mean}"
        if not isinstance(where, Class)
        else f"{vars(where)} {Class.total} {Class.mean}"
    )


def drawn(where: Any) -> float:
    """The number that a generator would draw next."""
    where = copy.deepcopy(where)
    return float(where.rand() if isinstance(where, np.random.RandomState) else where.random())


def size(where: Any) -> Any:
    """A number, or a tensor, that depends on the contents of a place."""
    if isinstance(where, nn.BatchNorm1d):
        return where.running_mean.sum() + where.num_batches_tracked
    if isinstance(where, nn.Linear):
        return where.weight.detach().sum()
    if isinstance(where, Class):
        return where.__dict__.get("new", 0) + Class.total + Class.mean
    if isinstance(where, Slots):
        return where.count
    if isinstance(where, nn.Module):
        left = len(where._forward_hooks), len(list(where.children())), where.__dict__.get("count", lambda: 0)()
        return where.__dict__.get("new", 0) + where.training + sum(left)
    if isinstance(where, GENERATORS):
        return drawn(where)
    return len(str(where))


IN_PLACE = ("class", "buffer", "parameter")  # which torch.func refuses


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (kind, how)
        for kind in PLACES
        for how in ("remat", "dots", "grad", "saved_residuals")
        if how != "grad" or kind not in IN_PLACE
    ],
)
def test_side_effects_in_every_place_match_the_plain_function(kind: str, how: str) -> None:
    make, leave = PLACES[kind]
    x, found = torch.linspace(0, 1, 4).requires_grad_(), []
    for wrap in (False, True):
        Class.total, Class.mean = 0, torch.zeros(())
        torch.manual_seed(0)
        where = make()

        def f(x: Tensor, where: Any = where) -> Tensor:
            leave(where)
            return (x * size(where)).sin().sin()

        run: Any = f
        if wrap and how == "saved_residuals":
            tx.saved_residuals(f, x)
        elif wrap:
            run = tx.remat(f, policies.dots_saveable if how == "dots" else None)
        if how == "grad":
            grad = torch.func.grad(lambda x, run=run: run(x).sum())(x.detach())
        else:
            (grad,) = torch.autograd.grad(run(x).sum(), x)
        found.append((words(where), grad.tolist()))
    assert found[1] == found[0]


def test_variables_of_a_closure_and_of_this_file() -> None:
    def make() -> Any:
        count, mean = 0, torch.zeros(())

        def f(x: Tensor) -> Tensor:
            nonlocal count, mean
            count += 1
            mean = mean + x.detach().mean()
            return (x * count + mean).sin().sin()

        return f, lambda: (count, mean.item())

    x, found = torch.ones(2, requires_grad=True), []
    for wrap in (lambda f: f, tx.remat):
        f, left = make()
        run = wrap(f)
        for _ in range(2):
            (grad,) = torch.autograd.grad(run(x).sum(), x)
        found.append((grad.tolist(), left()))
    assert found[1] == found[0]


@dataclasses.dataclass
class State:
    mean: Tensor


# Functions that write into a tensor with values, which no module holds.
WRITES: dict[str, Callable[[State], Any]] = {
    "in place": lambda s: s.mean.add_(0.25),
    "of a view": lambda s: s.mean.view(2, 2)[0].add_(0.25),
    "data": lambda s: s.mean.data.mul_(2),
    "out": lambda s: torch.add(s.mean, 1, out=s.mean),
    "foreach": lambda s: torch._foreach_add_([s.mean], 1.0),
    "aten": lambda s: torch.ops.aten.add_.Tensor(s.mean, torch.ones(4)),
    "random": lambda s: s.mean.normal_(),
    "anew": lambda s: setattr(s, "mean", s.mean + 1),
    "item": lambda s: s.mean.__setitem__(0, 3.0),
    "copy_": lambda s: s.mean.copy_(s.mean * 2),
}  # fmt: skip
PLANS: dict[str, Callable[[Any, Tensor], Any]] = {
    "saved_residuals": lambda f, x: tx.saved_residuals(f, x),
    "saved_residuals of a remat": lambda f, x: tx.saved_residuals(tx.remat(f), x),
    "of a policy": lambda f, x: tx.saved_residuals(tx.remat(f, policies.dots_saveable), x),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("write", WRITES)
def test_plans_do_not_modify_state(write: str, plan: str) -> None:
    state, x = State(torch.ones(4)), torch.ones(3, 4, requires_grad=True)
    mean = state.mean

    def f(x: Tensor) -> Tensor:
        WRITES[write](state)
        return (x * state.mean.clone()).sum()

    PLANS[plan](f, x)
    assert state.mean is mean and mean.tolist() == [1.0] * 4 and mean._version == 0


def test_arrays_of_numpy_that_a_plan_lends_are_copies() -> None:
    mean = torch.ones(4)

    def f(x: Tensor) -> Tensor:
        mean.numpy()[:] += 1
        return (x * mean).sum()

    tx.saved_residuals(f, torch.ones(4, requires_grad=True))
    assert mean.tolist() == [1.0] * 4


NEED_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "branch": lambda x: x.sin() * 2 if x.detach().sum() > 0 else x.cos(),
    "item": lambda x: x * x.detach().sum().item(),
    "tolist": lambda x: x * x.detach().tolist()[0],
    "numpy": lambda x: x * float(np.sum(x.detach().numpy())),
    "nonzero": lambda x: x[x.detach().nonzero().squeeze(-1)].sin(),
    "torch.func": lambda x: torch.func.grad(lambda z: (z.sin() * z).sum())(x) * x,
}  # fmt: skip


@pytest.mark.parametrize("name", NEED_VALUES)
def test_functions_that_no_plan_can_run_are_a_value_error(name: str) -> None:
    f, x = NEED_VALUES[name], torch.linspace(0.1, 1, 4).requires_grad_()
    raises_text(ValueError, lambda: tx.saved_residuals(f, x), "without values")
    (want,), (got,) = (torch.autograd.grad(run(x).sum(), x) for run in (f, tx.remat(f)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def _sin(x: Tensor) -> Tensor:
    return x.sin()


def _cos(x: Tensor) -> Tensor:
    return x.cos()


CURRENT = _sin


def _turns(x: Tensor) -> Tensor:
    global CURRENT
    y = CURRENT(x).exp()
    CURRENT = _cos if CURRENT is _sin else _sin
    return y


def test_a_function_that_is_assigned_to_a_global() -> None:
    x = torch.randn(3)
    want = [torch.func.grad(lambda x, f=f: f(x).exp().sum())(x) for f in (_sin, _cos, _sin)]
    for _ in range(2):
        given = [x.clone().requires_grad_() for _ in want]
        for one in [(tx.remat(_turns)(x), x) for x in given]:
            one[0].sum().backward()
        assert all(torch.equal(x.grad, w) for x, w in zip(given, want, strict=True) if x.grad is not None)
        assert CURRENT is _cos
        _turns(x)


def test_a_generator_without_a_state_may_be_reached() -> None:
    chance, x = random.SystemRandom(), torch.ones(3, requires_grad=True)
    tx.remat(lambda x: torch.tanh(x) * (2 if chance else 1))(x).sum().backward()
    assert x.grad is not None


def test_no_class_is_kept_alive() -> None:
    def use() -> Any:
        class Own(nn.Module):
            scale = torch.ones(2)

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.scale).sin()

        tx.remat(Own())(torch.ones(2, requires_grad=True)).sum().backward()
        return weakref.ref(Own)

    kind = use()
    gc.collect()
    assert kind() is None
