"""Operations on a module's state, on values and on the graph, of which functions are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from fjoin import transforms as tx


class Square(torch.autograd.Function):
    """A function of the old form, which torch.func does not take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


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


class Triple(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 3


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    @tx.remat
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x)).sin(), 0.5)


class World(nn.Module):
    """Parameters, buffers, and attributes, which the operations use."""

    def __init__(self, parts: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.parts = nn.ModuleDict({name: MODULES[name][0]() for name in parts if name in MODULES})
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("n", torch.tensor(0.0))
        self.register_buffer("mean", torch.zeros(4))
        self.n: Tensor
        self.mean: Tensor
        self.plain, self.calls, self.generator = torch.ones(4), 0, torch.Generator().manual_seed(3)
        self.last: Any = None
        self.seen: list[Tensor] = []
        self.rows = [torch.ones(4)]

    def left(self) -> dict[str, Any]:
        """What calls have left: values, and which objects are the first ones."""
        found: dict[str, Any] = {name: b.clone() for name, b in self.named_buffers()}
        found |= {f"grad of {name}": None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}
        found |= {"plain": self.plain.clone(), "calls": self.calls, "training": [m.training for m in self.modules()]}
        found |= {"last": None if self.last is None else self.last.detach().clone()}
        found |= {"attributes": sorted(vars(self)), "generator": self.generator.get_state()}
        return found | {"seen": [x.clone() for x in self.seen], "rows": [x.clone() for x in self.rows]}

    def held(self) -> dict[str, Any]:
        """The objects in the places that operations may change."""
        places = {**self._buffers, **self.norm._buffers, **self._parameters, "plain": self.plain, "last": self.last}
        return places | {"seen": self.seen, **{f"seen {i}": x for i, x in enumerate(self.seen)}}


def last(*values: Any) -> Any:
    return values[-1]


# In-place operations on a tensor of four.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda b: b.add_(1), "view": lambda b: b.view(2, 2).add_(1), "row": lambda b: b[0].add_(1),
    "item": lambda b: b.__setitem__(0, 3.0), "item +=": lambda b: b.__setitem__(0, b[0] + 1),
    "detach": lambda b: b.detach().mul_(2).add_(1), "unbind": lambda b: b.unbind()[1].add_(1),
    "init": lambda b: nn.init.constant_(b, 2.0), "aten": lambda b: torch.ops.aten.add_.Tensor(b, torch.ones(4)),
    "out": lambda b: torch.add(b, 1, out=b), "copy_": lambda b: b.copy_(b * 2 + 1), "random": lambda b: b.normal_(),
}  # fmt: skip


def op_submodule(m: World, h: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.late = nn.Linear(2, 2)
    m.parts.add_module(f"late {len(m.parts)}", nn.Identity())
    return h * len(m.parts)


def op_grad_inside(m: World, h: Tensor) -> Tensor:
    y = h.sin() * 1.0
    if not y.requires_grad:
        return y
    return torch.autograd.grad((y**3).sum(), y, create_graph=True)[0] * h


def op_by_inner(m: World, h: Tensor) -> Tensor:
    y = h.detach()
    y.requires_grad = True
    return h * torch.autograd.grad(y.pow(3).sum(), y)[0]


def op_in_place(m: World, h: Tensor) -> Tensor:
    y = h * 2
    y.mul_(3).relu_()
    return y


def op_product_in_place(m: World, h: Tensor) -> Tensor:
    """A result that some policies keep is written into."""
    product = h @ m.linear.weight
    y = product * 3.0
    product += y
    return product.mul_(2.0).tanh()


def op_attention(m: World, h: Tensor) -> Tensor:
    q = h.view(1, 1, 3, 4)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos()).view(3, 4)


def op_no_grad(m: World, h: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.norm() + 1
    return h / size


def op_escapes(m: World, h: Tensor) -> Tensor:
    """Values leave torch and come back."""
    product = (h @ m.linear.weight).detach()
    return h * torch.from_numpy(np.tanh(product.numpy())) + h.sin() * product.tolist()[0][0]


def op_hook(m: World, h: Tensor) -> Tensor:
    y = h @ m.linear.weight
    if y.requires_grad:
        y.register_hook(lambda grad: grad * y.detach())
    return y.sin() + h


# Name -> what makes a module, and what runs it.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(4, 4), lambda part, h: part(h[None])[0][0]),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda part, h: part(h[None])[0]),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), lambda part, h: part(h).sin()),
    "weight norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), lambda part, h: part(h).sin()),
    "parametrized": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), lambda part, h: part(h).sin()),
    "cached": (lambda: parametrize.register_parametrization(nn.Linear(4, 4), "weight", Triple()), lambda part, h: part(part(h).sin())),
    "renormalizes": (lambda: nn.Embedding(5, 4, max_norm=1.0), lambda part, h: h * part(torch.tensor([1, 2, 1]))),
    "script": (lambda: torch.jit.script(nn.Linear(4, 4)), lambda part, h: part(h).sin()),
    "decorated": (Decorated, lambda part, h: part(h)),
}  # fmt: skip
OPS: dict[str, Callable[[World, Tensor], Tensor]] = {
    **{name[3:]: value for name, value in list(globals().items()) if name.startswith("op_")},
    "force": lambda m, h: torch.func.grad(lambda z: (z.sin() * z).sum())(h * m.scale) * h,
    "rows": lambda m, h: torch.func.vmap(lambda row: row.sin() * row.sum())(h),
    "asks": lambda m, h: h * 2 if h.requires_grad else h * 3,
    "asks_result": lambda m, h: h.sin() * (2 if h.cos().requires_grad else 3),
    "asks_grad_fn": lambda m, h: h.sin() * (3 if h.cos().grad_fn is None else 2),
    "asks_grad_mode": lambda m, h: h * 2 if torch.is_grad_enabled() else h * 3,
    "device": lambda m, h: h.sin() * 2 if torch.empty(0).device.type == "meta" else h.sin() * 3,
    "asks_leaf": lambda m, h: h.sin() if h.is_leaf else h.cos().exp(),
    "branch": lambda m, h: h.sin() * 2 if h.detach().sum() > 0 else h.cos(),
    "one_hot": lambda m, h: h * F.one_hot(torch.tensor([0, 1, 2]), 4).to(h.dtype),
    "zeros": lambda m, h: h * torch.zeros(4).numel() + torch.zeros(3, 4),
    "empty": lambda m, h: h * torch.empty(5).numel() * torch.empty(3, 4).fill_(2.0) * torch.ones(3, 1) * h.new_ones(4),
    "named": lambda m, h: tx.checkpoint_name(h.tanh(), "h").sin(),
    "again": lambda m, h: tx.remat(lambda h: (m.linear(h).sin() * m.scale).tanh())(h),
    "count": lambda m, h: last(m.n.add_(1), h * m.n.clone()),
    "mean": lambda m, h: last(m.mean.add_(h.detach().mean(0)), h - m.mean.clone()),
    "mean_anew": lambda m, h: last(setattr(m, "mean", 0.9 * m.mean + h.detach().mean(0)), h + m.mean),
    "plain": lambda m, h: last(m.plain.mul_(1.5), h * m.plain.clone()),
    "plain_anew": lambda m, h: last(setattr(m, "plain", m.plain + 1), h * m.plain),
    "calls": lambda m, h: last(setattr(m, "calls", m.calls + 1), h * m.calls),
    "new_attribute": lambda m, h: last(setattr(m, "more", getattr(m, "more", 0) + 1), h * m.more),
    "last": lambda m, h: last(setattr(m, "last", h.sin()), h + m.last),
    "seen": lambda m, h: last(m.seen.append(h.detach().exp()), h / len(m.seen)),
    "rows_anew": lambda m, h: last(m.rows.__setitem__(0, m.rows[0] + 1), h * m.rows[0]),
    "training": lambda m, h: last(m.drop.train(not m.drop.training), m.drop(h) * (2 + m.drop.training)),
    **{f"write: {name}": lambda m, h, w=write: last(w(m.mean), (h * m.mean.clone()).sin()) for name, write in WRITES.items()},
    **{name: lambda m, h, n=name: MODULES[n][1](m.parts[n], h) for name in MODULES},
    "linear": lambda m, h: m.linear(h),
    "norm": lambda m, h: m.norm(h),
    "dropout": lambda m, h: m.drop(h),
    # Random numbers are laid out in the order of memory, which differs below a transform.
    "dropout of a transposed value": lambda m, h: F.dropout(torch.einsum("ij,jk->ki", h, m.linear.weight).t(), 0.5),
    "scale": lambda m, h: h * m.scale,
    "tied": lambda m, h: h @ m.linear.weight.t(),
    "old form": lambda m, h: Square.apply(h) * 0.1,
    "own form": lambda m, h: Mul.apply(h.sin(), m.scale).tanh(),
    "new leaf": lambda m, h: (h * torch.full((4,), 2.0, requires_grad=True)).sin(),
    "torch's checkpoint": lambda m, h: checkpoint(lambda h: (h @ m.linear.weight).sin(), h, use_reentrant=False).sin(),
    "sparse": lambda m, h: (torch.eye(3).to_sparse() @ h).sin(),
    "sum of 99": lambda m, h: functools.reduce(torch.add, [h] * 99) * h.sin(),
    "orders": lambda m, h: h.sin() * 1.3 + h.cos() * 0.7 + h.exp() @ m.linear.weight,
    "sin": lambda m, h: h.sin(),
    "softmax": lambda m, h: h.softmax(-1),
    "layer_norm": lambda m, h: F.layer_norm(h, (4,), m.scale),
    "rand": lambda m, h: h * torch.rand(4),
    "own generator": lambda m, h: (h * torch.rand(4, generator=m.generator)).sin() * torch.rand(4, generator=m.generator),
    "arange": lambda m, h: h + torch.arange(4),
    "einsum": lambda m, h: torch.einsum("ij,jk,kl->il", h, m.linear.weight, m.linear.weight),
    "embedding": lambda m, h: F.embedding(torch.tensor([0, 2, 1]), h).sin(),
    "scatter_add": lambda m, h: torch.zeros(3, 4).scatter_add(0, torch.tensor([[0, 1, 2, 0]] * 3), h).sin(),
    "numpy": lambda m, h: h * float(h.detach().numpy().max()),
    "data_ptr": lambda m, h: h.sin() + 0 * (h.data_ptr() % 2),
    "clone": lambda m, h: h.clone().sin(),
    "detached": lambda m, h: h * h.detach().sin(),
}  # fmt: skip
