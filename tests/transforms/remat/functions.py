"""Functions made of operations, how they are wrapped and called, and everything that two calls of them leave."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import fjoin
from fjoin import transforms as tx
from fjoin.transforms import checkpoint_policies as policies

from .operations import OPS, World


@dataclasses.dataclass
class Notes:
    """A result that is an object."""

    mean: Tensor
    seen: list[Tensor]


class Pair(NamedTuple):
    h: Tensor
    n: int


def keeps(*words: str) -> Any:
    """A policy of one's own, by parts of an operation's name."""
    return lambda op, *args, **kwargs: any(word in str(op) for word in words)


BOTH = policies.save_and_offload_only_these_names(names_which_can_be_saved=["h"], names_which_can_be_offloaded=["out"])
# Options of remat; random cases have the first ones.
POLICIES: dict[str, dict[str, Any]] = {
    "nothing": {}, "dots": {"policy": policies.dots_saveable},
    "no batch": {"policy": policies.dots_with_no_batch_dims_saveable},
    "names": {"policy": policies.save_only_these_names("h")},
    "host": {"policy": policies.everything_saveable, "offload": "cpu"},
    "zeros": {"policy": lambda op, *args, **kwargs: op is torch.ops.aten.zeros.default},
    "makers": {"policy": keeps("ones", "empty", "clone", "detach")},
    "own": {"policy": keeps("sin", "mul", "clone", "zeros", "tanh", "gelu")},
    "everything": {"policy": policies.everything_saveable}, "nothing_saveable": {"policy": policies.nothing_saveable},
    "but names": {"policy": policies.save_any_names_but_these("h")},
    "dots and names": {"policy": policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("h"))},
    "no batch, to the host": {"policy": policies.offload_dot_with_no_batch_dims(), "offload": "cpu"},
    "names, some to the host": {"policy": BOTH, "offload": "cpu"}, "arguments to the host": {"offload": "cpu"},
    "dots to the host": {"policy": policies.dots_saveable, "offload": "cpu"},
}  # fmt: skip
DRAWN = list(POLICIES)[:8]


def again(f: Any, policy: str) -> Any:
    return tx.remat(f, **POLICIES[policy])


class SinIsCos(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.cos(*args) if func in (torch.sin, Tensor.sin) else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Any:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext, "function mode": SinIsCos, "device": lambda: torch.device("cpu"),
    "another device": lambda: torch.device("meta"), "default device": default_device, "cached": parametrize.cached,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16), "enable_grad": torch.enable_grad,
}  # fmt: skip
RESULTS: dict[str, Callable[[World, Tensor], Any]] = {
    "tensor": lambda m, h: h, "object": lambda m, h: Notes(h.sin(), [h]), "named tuple": lambda m, h: Pair(h.sin(), 3),
    "others": lambda m, h: (h, 3, "text", {"none": None, "dtype": torch.float32}, {1, 2}, h.max(-1)),
    "whole numbers": lambda m, h: (h, h.detach() * 2, torch.arange(3)), "parameter": lambda m, h: (h, m.scale, m.scale),
    "view of a parameter": lambda m, h: {"h": h, "view": m.scale.view(2, 2)}, "buffer": lambda m, h: (h, m.mean),
}  # fmt: skip


def of_result(out: Any) -> Tensor:
    """A number that depends on all tensors of a result."""
    if isinstance(out, Notes):
        return of_result([out.mean, *out.seen])
    parts = list(out.values()) if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else [out]
    return sum((x.sin() * 1.7).sum() for x in parts if isinstance(x, Tensor))


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, how it is wrapped, and how it is called.

    Attributes:
        ops: The names of its operations, in order.
        result: The form of its result.
        policy: See `POLICIES`.
        wrap: See `WRAPS`.
        mode: "plain", "twice" for two backward passes, "grad", "vjp", "rows" for vmap of a gradient, or "call" for gradients by
            parameters that functional_call puts in the place of the module's.
        around: See `AROUND`: what surrounds the forward pass alone.
    """

    ops: tuple[str, ...]
    result: str = "tensor"
    policy: str = "nothing"
    wrap: str = "remat"
    mode: str = "plain"
    around: str = "nothing"


# What depends on torch more than on a wrapper, where it meets others: not in random cases.
ALONE = ("asks_leaf", "lstm", "cached", "another device", "data_ptr", "numpy", "escapes", "renormalizes", "write: out")


def case_of(seed: int) -> Case:
    """A random case."""
    draw = random.Random(seed)
    ops = tuple(draw.choice([name for name in OPS if name not in ALONE]) for _ in range(draw.randint(1, 5)))
    result, policy = draw.choice([*RESULTS, "tensor", "tensor"]), draw.choice(DRAWN)
    wrap = draw.choice([*WRAPS, "remat", "remat"])
    mode = draw.choice(["plain", "plain", "plain", "twice", "grad", "vjp", "rows"])
    around = draw.choice([*(name for name in AROUND if name not in ALONE), "nothing", "nothing", "nothing"])
    if around == "autocast" and (policy != "nothing" or mode not in ("plain", "twice") or {"force", "rows"} & {*ops}):
        around = "nothing"  # a documented limit: each use of a weight converts it anew
    return Case(ops, result, policy, wrap, mode, around)


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.world, self._case = World(case.ops), case

    def forward(self, x: Tensor) -> Any:
        h = x
        for name in self._case.ops:
            h = OPS[name](self.world, h)
        return RESULTS[self._case.result](self.world, h)


class Around(nn.Module):
    """Runs a function of its block."""

    def __init__(self, block: Block, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block, self._run = block, [run]  # which may be the block

    def forward(self, x: Tensor) -> Tensor:
        return of_result(self._run[0](x))


def _planned(block: Block, x: Tensor, **options: Any) -> Callable[[Tensor], Any]:
    tx.saved_residuals(tx.remat(block, **options), x)
    return block


# Name -> what makes the function of x of a block, from x and options.
WRAPS: dict[str, Callable[..., Callable[[Tensor], Any]]] = {
    "remat": lambda block, x, **options: tx.remat(block, **options),
    "wrapper": lambda block, x, **options: fjoin.checkpoint_wrapper(block, **options),
    "plan": _planned,  # saved_residuals, before a plain call
    "closure": lambda block, x, **options: tx.remat(lambda x: block(x), **options),
    "method": lambda block, x, **options: tx.remat(block.forward, **options),
    "partial": lambda block, x, **options: tx.remat(functools.partial(type(block).forward, block), **options),
    "argument": lambda block, x, **options: lambda x: tx.remat(lambda module, x: module(x), **options)(block, x),
    "set": lambda block, x, **options: (lambda held: tx.remat(lambda x: next(iter(held))(x), **options))({block}),
    "deque": lambda block, x, **options: (lambda held: tx.remat(lambda x: held[0](x), **options))(deque([block])),
    "long list": lambda block, x, **options: (lambda held: tx.remat(lambda x: held[-1](x), **options))([None] * 101 + [block]),
    "container": lambda block, x, **options: tx.remat(lambda x, *, _held={"blocks": [block]}: _held["blocks"][0](x), **options),
}  # fmt: skip


# Name -> a derivative of a function at x.
MODES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.tensor(1.0))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "rows": lambda f, x: torch.func.vmap(torch.func.grad(f), randomness="different")(torch.stack([x, x + 1])),
}


def outcome(case: Case, plain: bool) -> dict[str, Any]:
    """What two steps give and leave, of the case or of its plain function."""
    torch.manual_seed(0)
    block = Block(case)
    found: dict[str, Any] = {}
    run: Any = block if plain else None
    for step in range(2):
        x = torch.linspace(-1, 1, 12).view(3, 4) + 0.1 * step
        if case.mode in ("plain", "twice"):
            x.requires_grad_()
        run = WRAPS[case.wrap](block, x, **POLICIES[case.policy]) if run is None else run
        found |= {
            f"step {step}: {name}": value for name, value in _step(case, block, run, x, x * 1.0 if step else x).items()
        }
    return found


def _step(case: Case, block: Block, run: Callable[[Tensor], Any], x: Tensor, given: Tensor) -> dict[str, Any]:
    world, found = block.world, {}
    if case.mode in ("plain", "twice"):
        with AROUND[case.around]():
            out = of_result(run(given))
        between = world.held()
        if out.requires_grad:
            out.backward(retain_graph=case.mode == "twice")
            if case.mode == "twice":
                out.backward()
        after = world.held()
        found |= {"the same objects": [name for name in between if after.get(name) is not between[name]]}
        found |= {"out": out.detach().clone(), "grad": None if x.grad is None else x.grad.clone()}
    elif case.mode == "call":
        around = Around(block, run)
        params = {path: p.detach() + 0.5 for path, p in around.named_parameters()}
        of = lambda params: torch.func.functional_call(around, params, (x,))  # noqa: E731
        moving = {path: p.clone().requires_grad_() for path, p in params.items()}
        found |= {
            "grads": torch.func.grad(of)(params),
            "whole": torch.func.grad(of if run is block else tx.remat(of))(params),
        }
        found |= {"by autograd": torch.autograd.grad(of(moving), list(moving.values()), allow_unused=True)}
    else:
        with AROUND[case.around]():
            found |= {"grad": MODES[case.mode](lambda x: of_result(run(x)), x).detach().clone()}
    found |= world.left()
    return found | {"random": torch.get_rng_state()}
