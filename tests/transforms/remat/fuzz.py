"""Random functions with state, and everything that a call of them leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fjoin
from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies


class Square(torch.autograd.Function):
    """A function of the old form, which torch.func does not take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@dataclasses.dataclass
class Notes:
    """A result that is an object."""

    mean: Tensor
    seen: list[Tensor]


class World(nn.Module):
    """Parameters, buffers, and attributes, which the operations use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("n", torch.tensor(0.0))
        self.register_buffer("mean", torch.zeros(4))
        self.n: Tensor
        self.mean: Tensor
        self.plain, self.calls = torch.ones(4), 0
        self.last: Any = None
        self.seen: list[Tensor] = []

    def left(self) -> dict[str, Any]:
        """What calls have left: values, and which objects are the first ones."""
        found: dict[str, Any] = {name: b.clone() for name, b in self.named_buffers()}
        found |= {f"grad of {name}": None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}
        found |= {"plain": self.plain.clone(), "calls": self.calls, "training": self.training}
        found |= {"last": None if self.last is None else self.last.detach().clone()}
        return found | {"seen": [x.clone() for x in self.seen]}

    def held(self) -> dict[str, Any]:
        """The objects in the places that operations may change."""
        places = {**self._buffers, **self.norm._buffers, **self._parameters, "plain": self.plain, "last": self.last}
        return places | {"seen": self.seen, **{f"seen {i}": x for i, x in enumerate(self.seen)}}


def op_count(m: World, h: Tensor) -> Tensor:
    m.n += 1
    return h * m.n.clone()


def op_mean(m: World, h: Tensor) -> Tensor:
    m.mean += h.detach().mean(0)
    return h - m.mean


def op_mean_anew(m: World, h: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + h.detach().mean(0)
    return h + m.mean


def op_lerp(m: World, h: Tensor) -> Tensor:
    m.mean.lerp_(h.detach().mean(0), 0.1)
    return h * (1 + m.mean)


def op_plain(m: World, h: Tensor) -> Tensor:
    m.plain.mul_(1.5)
    return h * m.plain.clone()


def op_plain_anew(m: World, h: Tensor) -> Tensor:
    m.plain = m.plain + 1
    return h * m.plain


def op_calls(m: World, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def op_last(m: World, h: Tensor) -> Tensor:
    m.last = h.sin()
    return h + m.last


def op_seen(m: World, h: Tensor) -> Tensor:
    m.seen.append(h.detach().exp())
    return h / len(m.seen)


def op_force(m: World, h: Tensor) -> Tensor:
    return torch.func.grad(lambda z: (z.sin() * z).sum())(h) * h


def op_rows(m: World, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row.sin() * row.sum())(h)


def op_grad_inside(m: World, h: Tensor) -> Tensor:
    y = h.sin() * 1.0
    if not y.requires_grad:
        return y
    return torch.autograd.grad((y**3).sum(), y, create_graph=True)[0] * h


def op_asks(m: World, h: Tensor) -> Tensor:
    return h * 2 if h.requires_grad else h * 3


def op_asks_grad_mode(m: World, h: Tensor) -> Tensor:
    return h * 2 if torch.is_grad_enabled() else h * 3


def op_device(m: World, h: Tensor) -> Tensor:
    return h.sin() * 2 if torch.empty(0).device.type == "meta" else h.sin() * 3


def op_branch(m: World, h: Tensor) -> Tensor:
    return h.sin() * 2 if h.detach().sum() > 0 else h.cos()


def op_one_hot(m: World, h: Tensor) -> Tensor:
    return h * F.one_hot(torch.tensor([0, 1, 2]), 4).to(h.dtype)


def op_in_place(m: World, h: Tensor) -> Tensor:
    y = h * 2
    y.mul_(3).relu_()
    return y


def op_zeros(m: World, h: Tensor) -> Tensor:
    return h * torch.zeros(4).numel() + torch.zeros(3, 4)


def op_sort(m: World, h: Tensor) -> Tensor:
    values, places = h.sort(-1)
    return values * places


def op_mask(m: World, h: Tensor) -> Tensor:
    return torch.where(h > 0, h, 0.1 * h).masked_fill(torch.eye(3, 4) > 0, 0.5)


def op_index(m: World, h: Tensor) -> Tensor:
    return h.index_select(0, torch.tensor([2, 0, 1])).gather(1, torch.tensor([[3, 2, 1, 0]] * 3))


def op_attention(m: World, h: Tensor) -> Tensor:
    q = h.view(1, 1, 3, 4)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos()).view(3, 4)


def op_no_grad(m: World, h: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.norm() + 1
    return h / size


def op_named(m: World, h: Tensor) -> Tensor:
    return tx.checkpoint_name(h.tanh(), "h").sin()


def op_again(m: World, h: Tensor) -> Tensor:
    return tx.remat(lambda h: (m.linear(h).sin() * m.scale).tanh())(h)


OPS: dict[str, Callable[[World, Tensor], Tensor]] = {
    **{name[3:]: value for name, value in list(globals().items()) if name.startswith("op_")},
    "linear": lambda m, h: m.linear(h),
    "norm": lambda m, h: m.norm(h),
    "dropout": lambda m, h: m.drop(h),
    "scale": lambda m, h: h * m.scale,
    "tied": lambda m, h: h @ m.linear.weight.t(),
    "old form": lambda m, h: Square.apply(h) * 0.1,  # type: ignore[no-untyped-call]
    "sin": lambda m, h: h.sin(),
    "exp": lambda m, h: (-h.square()).exp(),
    "softmax": lambda m, h: h.softmax(-1),
    "layer_norm": lambda m, h: F.layer_norm(h, (4,), m.scale),
    "gelu": lambda m, h: F.gelu(h),
    "rand": lambda m, h: h * torch.rand(4),
    "arange": lambda m, h: h + torch.arange(4),
    "cumsum": lambda m, h: h.cumsum(0),
    "einsum": lambda m, h: torch.einsum("ij,jk,kl->il", h, m.linear.weight, m.linear.weight),
    "transpose": lambda m, h: h.t().contiguous().view(3, 4),
    "clone": lambda m, h: h.clone().sin(),
    "detached": lambda m, h: h * h.detach().sin(),
    "max": lambda m, h: h - h.max(-1, keepdim=True).values,
}  # fmt: skip

POLICIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dots": {"policy": policies.dots_saveable},
    "no batch": {"policy": policies.dots_with_no_batch_dims_saveable},
    "names": {"policy": policies.save_only_these_names("h")},
    "host": {"policy": policies.everything_saveable, "offload": "cpu"},
    "zeros": {"policy": lambda op, *args, **kwargs: op is torch.ops.aten.zeros.default},
    "own": {"policy": lambda op, *args, **kwargs: any(word in str(op) for word in ("sin", "mul", "clone", "zeros"))},
}


class SinIsCos(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.cos(*args) if func in (torch.sin, Tensor.sin) else func(*args, **(kwargs or {}))


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext, "function mode": SinIsCos, "device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}  # fmt: skip
RESULTS: dict[str, Callable[[World, Tensor], Any]] = {
    "tensor": lambda m, h: h, "object": lambda m, h: Notes(h.sin(), [h]),
    "others": lambda m, h: (h, 3, "text", {"none": None}), "parameter": lambda m, h: (h, m.scale),
    "buffer": lambda m, h: (h, m.mean),
}  # fmt: skip


def of_result(out: Any) -> Tensor:
    """A number that depends on all tensors of a result."""
    if isinstance(out, Notes):
        return of_result([out.mean, *out.seen])
    parts = out if isinstance(out, (tuple, list)) else [out]
    return sum((x.sin() * 1.7).sum() for x in parts if isinstance(x, Tensor))  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, how it is wrapped, and how it is called.

    Attributes:
        ops: The names of its operations, in order.
        result: The form of its result.
        policy: See `POLICIES`.
        wrap: "remat", "wrapper" for fjoin.checkpoint_wrapper, or "plan" for saved_residuals before a plain call.
        mode: "plain", "twice" for two backward passes, "grad", "vjp" or "rows" for vmap of a gradient.
        around: See `AROUND`: what surrounds the forward pass alone.
    """

    ops: tuple[str, ...]
    result: str
    policy: str
    wrap: str
    mode: str
    around: str


def case_of(seed: int) -> Case:
    """A random case."""
    draw = random.Random(seed)
    ops = tuple(draw.choice(list(OPS)) for _ in range(draw.randint(1, 5)))
    result, policy = draw.choice([*RESULTS, "tensor", "tensor"]), draw.choice(list(POLICIES))
    wrap = draw.choice(["remat", "remat", "wrapper", "plan"])
    mode = draw.choice(["plain", "plain", "plain", "twice", "grad", "vjp", "rows"])
    around = draw.choice([*AROUND, "nothing", "nothing", "nothing"])
    if around == "autocast" and (policy != "nothing" or mode not in ("plain", "twice") or {"force", "rows"} & {*ops}):
        around = "nothing"  # a documented limit: each use of a weight converts it anew
    return Case(ops, result, policy, wrap, mode, around)


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.world, self._case = World(), case

    def forward(self, x: Tensor) -> Any:
        h = x
        for name in self._case.ops:
            h = OPS[name](self.world, h)
        return RESULTS[self._case.result](self.world, h)


def _wrapped(block: Block, case: Case, x: Tensor) -> Callable[[Tensor], Any]:
    if case.wrap == "plan":
        tx.saved_residuals(tx.remat(block, **POLICIES[case.policy]), x)
        return block
    if case.wrap == "wrapper":
        return fjoin.checkpoint_wrapper(block, **POLICIES[case.policy])
    return tx.remat(block, **POLICIES[case.policy])


def outcome(case: Case, plain: bool) -> dict[str, Any]:
    """What two steps give and leave.

    Args:
        case: The case.
        plain: Whether the function runs as it is.
    """
    torch.manual_seed(0)
    block = Block(case)
    found: dict[str, Any] = {}
    run = block if plain else None
    for step in range(2):
        x = torch.linspace(-1, 1, 12).view(3, 4) + 0.1 * step
        if case.mode in ("plain", "twice"):
            x.requires_grad_()
        run = _wrapped(block, case, x) if run is None else run
        found |= {f"step {step}: {name}": value for name, value in _step(case, block, run, x).items()}
    return found


def _step(case: Case, block: Block, run: Callable[[Tensor], Any], x: Tensor) -> dict[str, Any]:
    world, found = block.world, {}
    if case.mode in ("plain", "twice"):
        with AROUND[case.around]():
            out = of_result(run(x))
        between = world.held()
        if out.requires_grad:
            out.backward(retain_graph=case.mode == "twice")
            if case.mode == "twice":
                out.backward()
        after = world.held()
        found |= {"the same objects": [name for name in between if after.get(name) is not between[name]]}
        found |= {"out": out.detach().clone(), "grad": None if x.grad is None else x.grad.clone()}
    else:
        with AROUND[case.around]():
            of: Callable[[Tensor], Tensor] = lambda x: of_result(run(x))  # noqa: E731
            if case.mode == "grad":
                grad = torch.func.grad(of)(x)
            elif case.mode == "vjp":
                grad = torch.func.vjp(of, x)[1](torch.tensor(1.0))[0]
            else:
                grad = torch.func.vmap(torch.func.grad(of), randomness="different")(torch.stack([x, x + 1]))
        found |= {"grad": grad.detach().clone()}
    found |= world.left()
    return found | {"random": torch.get_rng_state()}
