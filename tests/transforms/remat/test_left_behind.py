"""What calls, second runs and plans leave in modules, and what a function may not write into."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text

from .fuzz import AROUND, OPS, POLICIES, RESULTS, Case
from .test_fuzz import check

pytestmark = pytest.mark.usefixtures("host")
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
            refused = result == "object" and mode in ("grad", "rows")
            assert check(Case(("linear", "sin"), result, policy, "remat", mode, around)) == (
                "refused" if refused else "same"
            )


class Own(nn.Module):
    """A module with state of many kinds, which `write` changes and `value` reads."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.write, self.linear, self.norm = write, nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor
        self.plain, self.rows = torch.ones(4), [torch.ones(4)]
        self.calls, self.new = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return (x * self.value()).sin().sin()

    def value(self) -> Tensor:
        size = self.calls + self.new + len(self.rows) + self.training + len(list(self.children()))
        return self.mean + self.plain * size + self.rows[0] + self.norm.running_mean + self.norm.num_batches_tracked

    def left(self) -> Any:
        left = [self.value(), *self.rows, *self.state_dict().values()]
        return [x.tolist() for x in left], self.calls, self.training, sorted(vars(self)), len(self._modules)


# What a call changes in a module.
STATE: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "calls", m.calls + 1),
    "new attribute": lambda m: setattr(m, "more", getattr(m, "more", 0) + 1) or setattr(m, "calls", m.more),
    "list": lambda m: m.rows.append(torch.ones(4)),
    "tensor in a list, anew": lambda m: m.rows.__setitem__(0, m.rows[0] + 1),
    "training": lambda m: m.train(not m.training),
    "buffer": lambda m: m.mean.add_(1),
    "buffer, through a view": lambda m: m.mean[0].add_(1),
    "buffer, anew": lambda m: setattr(m, "mean", m.mean + 1),
    "tensor attribute": lambda m: m.plain.mul_(2),
    "tensor attribute, anew": lambda m: setattr(m, "plain", m.plain * 2),
    "of a norm": lambda m: m.norm(torch.ones(3, 4)),
    "submodule": lambda m: m.append(nn.Identity()) if hasattr(m, "append") else m.add_module(str(len(m._modules)), nn.Identity()),
    "submodule that is made once": lambda m: None if hasattr(m, "late") else setattr(m, "late", nn.Linear(2, 2)),
    "nothing": lambda m: None,
}  # fmt: skip
IN_PLACE = ("buffer", "buffer, through a view", "tensor attribute", "of a norm")  # which torch.func refuses


HOWS = ("remat", "dots", "closure", "grad", "saved_residuals")


@pytest.mark.parametrize(
    ("kind", "how"), [(kind, how) for kind in STATE for how in HOWS if how != "grad" or kind not in IN_PLACE]
)
def test_state_of_modules_changes_once(kind: str, how: str) -> None:
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        module, x = Own(STATE[kind]), torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
        run: Any = module
        if wrap and how == "saved_residuals":
            tx.saved_residuals(module, x)
        elif wrap:
            run = tx.remat(
                (lambda x: module(x)) if how == "closure" else module,  # noqa: B023
                policies.dots_saveable if how == "dots" else None,
            )
        grads = []
        for _ in range(2):
            if how == "grad":
                grads.append(torch.func.grad(lambda x: run(x).sum())(x.detach()))  # noqa: B023
            else:
                grads += torch.autograd.grad(run(x).sum(), x)
        found.append((module.left(), [grad.tolist() for grad in grads], torch.rand(2).tolist()))
    assert found[1] == found[0]


def test_an_lstm_whose_parameters_a_transform_replaces() -> None:
    """Its weights are in a list, too."""
    lstm, x = nn.LSTM(4, 4), torch.linspace(-1, 1, 24).view(2, 3, 4)
    params = {name: p.detach() + 0.5 for name, p in lstm.named_parameters()}

    class Wrapped(nn.Module):
        def __init__(self, wrap: Callable[[Any], Any]) -> None:
            super().__init__()
            self.lstm, self._wrap = lstm, wrap

        def forward(self, x: Tensor) -> Any:
            return self._wrap(self.lstm)(x)[0]

    def grads(wrap: Callable[[Any], Any]) -> Any:
        given = {f"lstm.{name}": p for name, p in params.items()}
        of = lambda p: torch.func.functional_call(Wrapped(wrap), p, (x,)).sin().sum()  # noqa: E731
        moving = {name: p.clone().requires_grad_() for name, p in given.items()}
        return torch.func.grad(of)(given), torch.autograd.grad(of(moving), list(moving.values()))

    torch.testing.assert_close(grads(tx.remat), grads(lambda f: f), rtol=0, atol=0)


@dataclasses.dataclass
class State:
    """No module."""

    mean: Tensor


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda mean: mean.add_(0.25), "of a view": lambda mean: mean.view(2, 2)[0].add_(0.25),
    "out": lambda mean: torch.add(mean, 1, out=mean), "random": lambda mean: mean.normal_(),
    "aten": lambda mean: torch.ops.aten.add_.Tensor(mean, torch.ones(4)),
    "item": lambda mean: mean.__setitem__(0, 3.0), "copy_": lambda mean: mean.copy_(mean * 2),
    "batch_norm": lambda mean: F.batch_norm(torch.ones(3, 4), mean, torch.ones(4), training=True),
}  # fmt: skip
HOLDERS: dict[str, Callable[[Tensor, Any], Callable[[Tensor], Tensor]]] = {
    "closure": lambda mean, write: lambda x: (write(mean), (x * mean.clone()).sin())[1],
    "object": lambda mean, write: (lambda state: lambda x: (write(state.mean), (x * state.mean.clone()).sin())[1])(State(mean)),
    "list": lambda mean, write: (lambda held: lambda x: (write(held[0]), (x * held[0].clone()).sin())[1])([mean]),
    "argument": lambda mean, write: lambda x, mean=mean: (write(mean), (x * mean.clone()).sin())[1],
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("write", [name for name in WRITES if name != "batch_norm"])  # it leaves no new version
def test_a_write_into_a_tensor_that_no_module_holds_is_an_error(write: str, holder: str) -> None:
    mean, x = torch.ones(4), torch.ones(3, 4, requires_grad=True)
    f = HOLDERS[holder](mean, WRITES[write])
    raises_text(ValueError, lambda: tx.remat(f)(x), "written into a tensor of shape (4,) that no module holds")


def test_a_write_into_a_buffer_by_another_name_is_an_error() -> None:
    module, x = Own(STATE["nothing"]), torch.ones(3, 4, requires_grad=True)
    mean = module.mean

    def f(x: Tensor) -> Tensor:
        mean.add_(1)
        return module(x) * mean.clone()

    raises_text(ValueError, lambda: tx.remat(f)(x).sum().backward(), "by another name")


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("wrap", [lambda f: f, tx.remat], ids=["plain", "remat"])
def test_plans_write_into_no_tensor(wrap: Any, write: str) -> None:
    mean, x = torch.ones(4), torch.ones(3, 4, requires_grad=True)
    f = HOLDERS["object"](mean, WRITES[write])
    with contextlib.suppress(ValueError):
        tx.saved_residuals(wrap(f), x)
    assert type(mean) is Tensor and mean.tolist() == [1.0] * 4 and mean._version == 0


def test_plans_refuse_writes_that_they_see() -> None:
    f = HOLDERS["object"](torch.ones(4), WRITES["in place"])
    raises_text(ValueError, lambda: tx.saved_residuals(f, torch.ones(3, 4)), "no module holds")


def test_torchs_checkpoint_writes_twice_and_its_gradients_are_wrong() -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[float, float]:
        mean, x = torch.zeros(1), torch.ones(1, requires_grad=True)

        def f(x: Tensor) -> Tensor:
            mean.add_(1)
            return (x * mean.clone()).exp()

        wrap(f)(x).sum().backward()
        assert x.grad is not None
        return round(x.grad.item(), 4), mean.item()

    assert run(lambda f: f) == (2.7183, 1.0)
    assert run(lambda f: lambda x: checkpoint(f, x, use_reentrant=False)) == (14.7781, 2.0)
    raises_text(ValueError, lambda: run(tx.remat), "no module holds")


def test_a_write_by_data_into_a_buffer_happens_twice_as_with_torch() -> None:
    """It leaves no version, so nothing shows it without a comparison of values in each call."""
    for wrap in (lambda f: lambda x: checkpoint(f, x, use_reentrant=False), tx.remat):
        module = nn.BatchNorm1d(1).eval()
        module.forward = lambda x, m=module: (x * m.running_var.data.add_(1).clone()).exp()  # type: ignore[method-assign, misc]
        wrap(module)(torch.ones(1, requires_grad=True)).sum().backward()
        assert module.running_var.item() == 3.0


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


@pytest.mark.parametrize("held", ["rows", "table"])
def test_a_large_table_beside_a_module_is_not_looked_through(held: str) -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.rows = nn.Linear(4, 4), list(range(1000)) if held == "rows" else [0]
            self.table = {str(i): i for i in range(1000)} if held == "table" else {}

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin() * len(self.rows)

    module, x = Big(), torch.ones(2, 4)
    want, got = (torch.autograd.grad(run(x).sum(), module.linear.weight) for run in (module, tx.remat(module)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_no_class_is_kept_alive() -> None:
    def use() -> Any:
        class Scaled(nn.Module):
            scale = torch.ones(2)

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.scale).sin()

        tx.remat(Scaled())(torch.ones(2, requires_grad=True)).sum().backward()
        return weakref.ref(Scaled)

    kind = use()
    gc.collect()
    assert kind() is None


@pytest.mark.parametrize("kind", [set, collections.deque, lambda some: [None] * 101 + some, lambda some: {"a": some}])
def test_modules_in_containers_are_reached(kind: Callable[[Any], Any]) -> None:
    norm = nn.BatchNorm1d(4)
    held = kind([norm])

    def fn(x: Tensor) -> Tensor:
        assert held
        return norm_of(held)(x).sin()

    def norm_of(held: Any) -> Any:
        return held["a"][0] if isinstance(held, dict) else next(one for one in held if one is not None)

    tx.remat(fn)(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 1
