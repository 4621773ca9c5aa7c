"""Functions of many kinds: under `remat` they do what they do without it, to the bit."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies
from tests.helpers import raises_text

pytestmark = pytest.mark.usefixtures("host")
POLICIES: dict[str, Any] = {
    "nothing": {},
    "dots": {"policy": policies.dots_saveable},
    "all to the host": {"policy": policies.everything_saveable, "offload": "cpu"},
    "own": {"policy": lambda op, *args, **kwargs: "sin" in str(op)},
}
HELD: dict[str, Any] = {}


class Mul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Mul.apply(x.sin(), self.weight).tanh()  # type: ignore[no-untyped-call,no-any-return]


@dataclasses.dataclass
class Batch:
    h: Tensor


class Written(nn.Module):
    """Writes into its buffer in some way."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(4))
        self.b: Tensor
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        self._write(self.b)
        return (x * self.b).sin()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda b: b.add_(1), "view": lambda b: b.view(2, 2).add_(1),
    "row": lambda b: b[0].add_(1), "item": lambda b: b.__setitem__(0, 3.0),
    "item +=": lambda b: b.__setitem__(0, b[0] + 1), "detach": lambda b: b.detach().mul_(2),
    "unbind": lambda b: b.unbind()[1].add_(1),
    "init": lambda b: nn.init.constant_(b, b[0].item() + 1),
    "aten": lambda b: torch.ops.aten.add_.Tensor(b, torch.ones(4)), "out": lambda b: torch.add(b, 1, out=b),
}  # fmt: skip


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    @tx.remat
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x)).sin(), 0.5)


def _escapes(x: Tensor, w: Tensor) -> Tensor:
    """Values leave torch and come back."""
    product = (x @ w).detach()
    return x * torch.from_numpy(np.tanh(product.numpy())) + x.sin() * product.tolist()[0][0]


def _loop(x: Tensor) -> Tensor:
    total = x * 0
    for _ in range(500):
        total = total + x
    return total * total.sin()


def _hooked(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.register_hook(lambda grad: grad * y.detach())
    return y.sin() + x


def _forces(x: Tensor) -> Tensor:
    y = x.sin() * 1.0
    (force,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    return force * x


def _new_leaf(x: Tensor) -> Tensor:
    return (x * torch.full((4,), 2.0, requires_grad=True)).sin()


def _frozen(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = w.view(-1).norm()
    return (x @ w / scale).sin()


def _mixed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x * 2).sin(), x.detach() * 2, torch.arange(3)


def _unused(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 0).sqrt(), x.sin() * 2


def _writes(write: Callable[[Tensor], Any]) -> Any:
    module = Written(write)
    return lambda x, w: module(x)


# Name -> what makes the function of x, (3, 4), and w, (4, 4).
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: (lambda m: lambda x, w: m(x[None])[0])(nn.LSTM(4, 4)),
    "gru": lambda: (lambda m: lambda x, w: m(x, w[:3]))(nn.GRUCell(4, 4)),
    "zeros": lambda: lambda x, w: torch.where(x > torch.zeros(4), x, 0.1 * x).sin() + torch.zeros(4),
    "encoder": lambda: (lambda m: lambda x, w: m(x[None]))(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
    "custom function": lambda: (lambda m: lambda x, w: m(x))(Fused()),
    "dataclass": lambda: lambda x, w, b=None: (x * HELD["batch"].h).sin(),
    "deque": lambda: lambda x, w: (x @ HELD["deque"][0]).sin(),
    "escapes": lambda: _escapes,
    "loop": lambda: lambda x, w: _loop(x),
    "hook": lambda: _hooked,
    "forces": lambda: lambda x, w: _forces(x),
    "new leaf": lambda: lambda x, w: _new_leaf(x),
    "no_grad": lambda: _frozen,
    "not differentiable": lambda: lambda x, w: _mixed(x),
    "unused result": lambda: lambda x, w: _unused(x),
    "spectral norm": lambda: (lambda m: lambda x, w: m(x).sin())(nn.utils.spectral_norm(nn.Linear(4, 4))),
    "weight norm": lambda: (lambda m: lambda x, w: m(x).sin())(nn.utils.weight_norm(nn.Linear(4, 4))),
    "parametrized": lambda: (lambda m: lambda x, w: m(x).sin())(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    ),
    "checkpoint": lambda: lambda x, w: checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False).sin(),
    "func": lambda: lambda x, w: x * torch.func.grad(lambda x: (x @ w).sin().sum())(x),
    "decorated": lambda: (lambda m: lambda x, w: m(x))(Decorated()),
    "script": lambda: (lambda m: lambda x, w: m(x).sin())(torch.jit.script(nn.Linear(4, 4))),
    "sparse": lambda: lambda x, w: (torch.eye(3).to_sparse() @ x).sin(),
    "in place": lambda: lambda x, w: F.relu_((x @ w).view(4, 3)).sin(),
    "dropout": lambda: lambda x, w: F.dropout(F.dropout(x, 0.5) @ w, 0.5).sin(),
    "orders": lambda: lambda x, w: x.sin() * 1.3 + x.cos() * 0.7 + x.exp() @ w,
    **{f"write: {name}": functools.partial(_writes, write) for name, write in WRITES.items()},
}  # fmt: skip


def outcome(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> Any:
    """The results, gradients, buffers and random numbers of one step, and of a second one."""
    torch.manual_seed(0)
    f = make()
    modules = [cell.cell_contents for cell in getattr(f, "__closure__", None) or ()]
    modules = [m for m in (f, *modules) if isinstance(m, nn.Module)]
    w = (torch.arange(16.0).view(4, 4) / 16).requires_grad_()
    HELD.update(batch=Batch(w.sin()[:3] * 2), deque=deque([w * 2]))
    found: list[Any] = []
    run = wrap(f)
    for step in range(2):
        x = torch.linspace(-1, 1, 12).view(3, 4).add(step).requires_grad_()
        if step:
            HELD.update(batch=Batch(w.sin()[:3] * 2), deque=deque([w * 2]))
        out = run(x, w)
        outs = [out] if isinstance(out, Tensor) else list(out)
        found += [(one.detach().clone(), one.requires_grad) for one in outs]
        used = outs[-1] if outs[-1].requires_grad else outs[0]
        (used * 1.7).sum().backward()
        found += [None if leaf.grad is None else leaf.grad.clone() for leaf in (x, w)]
        found += [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()] + [
            b.clone() for m in modules for b in m.buffers()
        ]
        found.append(torch.get_rng_state())
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_match_the_plain_function(name: str, policy: str) -> None:
    plain = outcome(FUNCTIONS[name], lambda f: f)
    again = outcome(FUNCTIONS[name], lambda f: tx.remat(f, **POLICIES[policy]))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


class Holds(nn.Module):
    """Calls a module in a region that gets it as an argument."""

    def __init__(self, module: nn.Module, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = module
        self._wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        return self._wrap(lambda m, x: m(x).sin())(self.inner, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("module", [nn.Linear(4, 4), Fused()], ids=["linear", "custom function"])
def test_modules_as_arguments_under_func(module: nn.Module, policy: str) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    grads = []
    for wrap in (lambda f: f, lambda f: tx.remat(f, **POLICIES[policy])):
        holder = Holds(module, wrap)
        params = {name: p.detach() for name, p in holder.named_parameters()}
        grads.append(torch.func.grad(lambda p, h=holder: torch.func.functional_call(h, p, (x,)).sum())(params))
    torch.testing.assert_close(grads[1], grads[0])
    assert all(grad.abs().sum() > 0 for grad in grads[1].values())


@pytest.mark.parametrize("policy", POLICIES)
def test_values_held_elsewhere_under_func(policy: str) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)

    def loss(w: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
        HELD["batch"] = Batch(w.sin() * 2)
        return wrap(lambda x: (x * HELD["batch"].h).sin())(x).sum()  # type: ignore[no-any-return]

    w = torch.linspace(0, 1, 4)
    want = torch.func.grad(loss)(w, lambda f: f)
    got = torch.func.grad(loss)(w, lambda f: tx.remat(f, **POLICIES[policy]))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_later_code_may_write_into_the_result(policy: str) -> None:
    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    layer, grads = nn.Linear(4, 4), []
    for wrap in (lambda f: f, lambda f: tx.remat(f, **POLICIES[policy])):
        leaf = x.clone().requires_grad_()
        F.relu_(wrap(layer)(leaf)).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_change_between_the_passes_is_an_error(policy: str) -> None:
    mask, x = torch.ones(3), torch.ones(3, requires_grad=True)
    y = tx.remat(lambda x: (x * mask).sin(), **POLICIES[policy])(x)
    mask.zero_()
    raises_text(RuntimeError, lambda: y.sum().backward(), "modified by an inplace operation")


def test_unused_tensors_may_change_between_the_passes() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def run(self, x: Tensor) -> Tensor:
            return self.first(x).tanh()  # type: ignore[no-any-return]

    out = tx.remat(Both().run)(torch.ones(2, 4))
    with torch.no_grad():
        second.weight.mul_(2)
    second(out).sum().backward()
    assert first.weight.grad is not None


def test_gradients_arrive_in_the_order_of_the_plain_function() -> None:
    """Buckets are sent in this order while the backward pass runs."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
    unused = nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.unused = blocks, unused

        def forward(self, x: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
            for i in range(4):
                x = wrap(lambda x, i=i: self.blocks[i](x))(x)  # a closure over the whole model
            return x

    model, seen = Model(), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))  # type: ignore[misc]
    orders = []
    for wrap in (lambda f: f, tx.remat):
        seen.clear()
        model(torch.ones(2, 4), wrap).sum().backward()
        orders.append(list(seen))
    assert orders[0] == orders[1] and len(orders[0]) == 8


def test_backward_pass_frees_the_arguments() -> None:
    h = torch.randn(8, 8, requires_grad=True) * 2
    kept = StorageWeakRef(h.untyped_storage())
    loss = tx.remat(lambda x: x.sin().tanh().sum())(h)
    del h
    assert not kept.expired()
    loss.backward()
    assert kept.expired()  # although the loss is alive


def test_arguments_that_wait_elsewhere_leave_memory() -> None:
    h = torch.randn(8, 8, requires_grad=True) * 2
    kept = StorageWeakRef(h.untyped_storage())
    loss = tx.remat(lambda x: x.sin().tanh().sum(), policies.everything_saveable, "cpu")(h)
    del h
    assert kept.expired()
    loss.backward()
