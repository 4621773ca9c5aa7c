"""Faults of torch that ours does not have. Each row asserts torch's faulty number, and the right one of ours.

Where a row fails on torch's side, torch has mended it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    powerSGD_hook as power,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import SIZES, TORCHS, called, holder
from tests.optim import averager_problem
from tests.oracle import comm_hooks as oracle
from tests.oracle.comm_hooks import Bucket
from tests.traffic import watched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

Params = nn.Parameter
F16, F32, F64 = torch.float16, torch.float32, torch.float64


class Row(NamedTuple):
    """A call, given "torch" or "fjoin", and what it gives: a value, words of an error, or either by rank."""

    call: Callable[[str], Any]
    theirs: Any
    ours: Any
    ranks: int = 2


def by_rank(*values: Any) -> Callable[[int], Any]:
    return lambda rank: values[rank]


def scalar() -> DistributedDataParallel:
    """y = w x with w = 0 and float64: the gradient of w is the input."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def weight(ddp: DistributedDataParallel) -> float:
    return float(ddp.module.weight.item())


def x(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def joined(kind: str, joinables: list[Any], **kwargs: Any) -> Any:
    """torch's Join takes no plain optimizers; ours takes them."""
    if kind == "torch":
        return Join([j for j in joinables if hasattr(j, "join_hook")], **kwargs)
    return fjoin.Join(joinables, **kwargs)


# -- hooks on buckets --------------------------------------------------------------------------------------------------


def hooked(kind: str, name: str, value: float, dtype: torch.dtype = F32, nccl: bool = True) -> Tensor:
    """The first bucket behind a hook, for gradients that all have one value."""
    ddp, params = holder(dtype)
    grads = [torch.full((n,), value, dtype=dtype) for n in SIZES]
    if kind == "fjoin":
        return called(ddp, fjoin.ddp.register_ddp_comm_hook(name, ddp), params, grads)[0]
    with oracle.gathers_as_nccl() if nccl else contextlib.nullcontext():
        return oracle.run(TORCHS[name], None, params, grads)[0]


def line() -> Any:
    """A module with one weight of 0, whose gradient is its input."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def composed(kind: str) -> float:
    """torch asks a hook for its name and its parameter's, and has no list of hooks; ours need only be transforms."""
    ddp = line()
    if kind == "torch":
        ddp.register_comm_hook(None, functools.partial(default_hooks.allreduce_hook, None))
    hook = tx.chain(tx.stateless(torch.sign), tx.mean("data"), tx.clip_by_value(0.5))
    fjoin.ddp.register(ddp, tx.fuse(hook, tx.partition({"weight": tx.sgd(1.0)})))
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return ddp.module.weight.item()


def registered_by_name(kind: str) -> float:
    ddp = line()
    register = register_ddp_comm_hook if kind == "torch" else fjoin.ddp.register_ddp_comm_hook
    register(DDPCommHookType.BF16_COMPRESS, ddp)
    ddp(torch.ones(1, 1)).backward()
    return ddp.module.weight.grad.item()


def state_of() -> power.PowerSGDState:
    return power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)


def zeros_then_ones(kind: str) -> list[float]:
    """NaN from a gradient of zeros on. torch's hook compresses from its third call on."""
    zeros, ones = torch.zeros(6, 6), torch.ones(6, 6)
    if kind == "torch":
        state, calls = state_of(), [zeros, zeros, zeros, ones, ones]
        seen = [power.powerSGD_hook(state, Bucket((g,), g.flatten())).wait()[0].item() for g in calls]  # type: ignore[arg-type]
        return seen[2:]
    hook, seen = tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0)), []
    with fjoin.bind(fjoin.mesh({"data": -1})):
        own = hook.init({"w": zeros})
        for grads in (zeros, ones, ones):
            out, own = hook.update({"w": grads}, own)
            seen.append(out["w"][0, 0].item())
    return seen


REFUSED = "BF16 all reduce communication hook required"
HOOKS = {
    "fp16: cast before it is divided": Row(lambda k: hooked(k, "FP16_COMPRESS", 1e5)[0].item(), math.inf, 1e5),
    "bf16: refused by name": Row(registered_by_name, REFUSED if torch.version.cuda is None else 1.0, 1.0),
    "quantized in gloo": Row(lambda k: hooked(k, "QUANTIZE_PER_TENSOR", 1.0, nccl=False)[0].item(), "IndexError", 1.0),
    "steps are at least 1.2e-7": Row(lambda k: hooked(k, "QUANTIZE_PER_TENSOR", 5e-8).abs().max().item(), 0.0, 5e-8),
    "float32 for every dtype": Row(lambda k: hooked(k, "QUANTIZE_PER_TENSOR", 1.0, F64).dtype, F32, F64),
    "hooks do not compose": Row(composed, "AttributeError", -0.5),
    "NaN after zeros": Row(zeros_then_ones, [math.nan] * 3, [0.0, 1.0, 1.0], 1),
}  # fmt: skip

# -- averagers and PostLocalSGDOptimizer -------------------------------------------------------------------------------


def averager(kind: str, name: str, *args: Any) -> Any:
    return averager_problem.made("torch's" if kind == "torch" else "ours", name, *args)


def own(*sizes: int) -> list[Params]:
    """Parameters with the value of the rank, and with gradients."""
    params = [Params(torch.full((n,), float(dist.get_rank()))) for n in sizes or (2, 3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def memory(kind: str) -> Any:
    """Parameters move into one storage, so a view, as of a flat buffer or a captured graph, keeps the old values."""
    params = own()
    view, before = params[0].detach(), [p.data_ptr() for p in params]
    averager(kind, "periodic", 2).average_parameters(params)
    kept, storages = [p.data_ptr() for p in params] == before, {p.untyped_storage().data_ptr() for p in params}
    return [kept, len(storages), view[0].item() == params[0][0].item() == 0.5]


def no_gradients(kind: str) -> float:
    """After `zero_grad()`, or if all that is trained is another optimizer's."""
    p = Params(torch.tensor(float(dist.get_rank())))
    averager(kind, "periodic", 2).average_parameters([p])
    return p.item()


def other_gradients(kind: str) -> list[float]:
    """Rank 0 has used the first of two equally large parameters, rank 1 the second. With other sizes ranks abort."""
    rank = dist.get_rank()
    params = [Params(torch.full((2,), 10.0 * i + rank)) for i in (1, 2)]
    params[rank].grad = torch.ones(2)
    averager(kind, "periodic", 2).average_parameters(params)
    return [p[0].item() for p in params]


def averaged_in(kind: str, name: str, period: Any, warmup: int = 0, steps: int = 24) -> list[int]:
    """The steps in which parameters are averaged."""
    one, (p,), due = averager(kind, name, period, warmup), own(1), []
    for step in range(steps):
        with torch.no_grad():
            p.fill_(dist.get_rank())
        one.average_parameters([p])
        due += [step] if p.item() == 0.5 else []
    return due


def local(kind: str, params: Any) -> Any:
    cls = PostLocalSGDOptimizer if kind == "torch" else fjoin.PostLocalSGDOptimizer
    return cls(torch.optim.SGD(params, 0.5), averager(kind, "periodic", 100, 50))


def lacks(kind: str) -> list[str]:
    one, found = local(kind, own()), []
    calls: dict[str, Callable[[], Any]] = {
        "closure": lambda: one.step(lambda: 3.0), "defaults": lambda: one.defaults["lr"],
        "post hook": lambda: one.register_step_post_hook(print), "pre hook": lambda: one.register_step_pre_hook(print),
        "state hook": lambda: one.register_state_dict_post_hook(print),
    }  # fmt: skip
    for name, call in calls.items():
        try:
            call()
        except (TypeError, AttributeError):
            found.append(name)
    return found


def loaded(kind: str) -> list[Any]:
    """`param_groups` is the list from before a load, so a scheduler changes rates that no step uses."""
    one = local(kind, own())
    one.load_state_dict(one.state_dict())
    for group in one.param_groups:  # as a scheduler does
        group["lr"] = 0.25
    return [one.optim.param_groups[0]["lr"], one.param_groups is one.optim.param_groups]


def skipped(kind: str) -> int:
    """A step that a scaler leaves out on rank 1 is not counted there: the ranks then average in different steps."""
    one, scaler = local(kind, [p := Params(torch.ones(1))]), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        one.zero_grad()
        scaler.scale((p * (math.inf if dist.get_rank() and step == 1 else 1.0)).sum()).backward()
        scaler.step(one)
        scaler.update()
    return one.averager.step  # type: ignore[no-any-return]


AVERAGERS = {
    "parameters change their memory": Row(memory, [False, 1, False], [True, 2, True]),
    "parameters without gradients are refused": Row(no_gradients, "non-empty", 0.5),
    "by gradients of each rank": Row(other_gradients, by_rank([15.5, 20.0], [11.0, 15.5]), [10.5, 20.5]),
    "a period of 0": Row(lambda k: averaged_in(k, "hierarchical", {2: 1, 0: 1}), "ZeroDivisionError", "got", 1),
    "longer periods do nothing": Row(lambda k: averaged_in(k, "hierarchical", {4: 1, 2: 2}, 0, 5), [0, 2, 4], "got"),
    "no closure, defaults and hooks": Row(lacks, ["closure", "defaults", "post hook", "pre hook", "state hook"], [], 1),
    "rates after a load": Row(loaded, [0.5, False], [0.25, True], 1),
    "steps that a scaler leaves out": Row(skipped, by_rank(3, 2), 3),
}  # fmt: skip

# -- ZeroRedundancyOptimizer -------------------------------------------------------------------------------------------


def zero_of(kind: str, model: nn.Module, **settings: Any) -> Any:
    cls: Any = ZeroRedundancyOptimizer if kind == "torch" else fjoin.ZeroRedundancyOptimizer
    return cls(model.parameters(), torch.optim.AdamW, lr=0.1, **settings)


def broadcasts(kind: str) -> list[int]:
    """A broadcast for each of 8 parameters; a load makes other ranks' entries None in the caller's dict."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    zero = zero_of(kind, model)
    model(torch.ones(2, 4)).sum().backward()
    with watched() as sent:
        zero.step()
    changed = 0
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = zero.state_dict()
        zero.load_state_dict(saved)
        changed = sum(one is None for one in saved["state"].values())
    return [sum(one.name == "broadcast" for one in sent), changed]


def moves(kind: str, backend: str) -> list[bool]:
    """Whether an overlap moves parameters in each of five passes; the learning rate is 0 from the fourth on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    zero = zero_of(kind, model, overlap_with_ddp=True)
    hook = hook_with_zero_step if kind == "torch" else fjoin.ddp.hook_with_zero_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: backend)
        made = hook(default_hooks.allreduce_hook, model, zero)
    model.register_comm_hook(None, made)
    found = []
    for i in range(5):
        if i == 3:
            zero.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in model.parameters()]
        zero.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        found.append(any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)))
    return found


MOVES = [True, True, True, False, False]
ZERO = {
    "broadcasts, and a changed state": Row(broadcasts, by_rank([8, 4], [8, 0]), [0, 0]),
    "the overlap is refused on gloo": Row(lambda k: moves(k, "gloo"), "may meet hangs", MOVES),
    "the overlap has two passes of delay": Row(lambda k: moves(k, "nccl"), [False, False, True, True, True], MOVES),
}

# -- Join --------------------------------------------------------------------------------------------------------------


def messages(kind: str, **settings: Any) -> Any:
    """Those of an iteration beside the gradients', in a Join and behind it, and whether an error leaves it enabled.

    torch's module keeps sending the messages of a Join, its count and its flag, in every later iteration.
    """
    ddp, counts = scalar(), []
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer], **settings):
        for _ in range(3):
            with watched() as sent:
                ddp(x(1.0)).backward()
            counts.append(len(sent))
    with watched() as sent:
        ddp(x(1.0)).backward()
    with contextlib.suppress(KeyError), joined(kind, [ddp, optimizer]):
        raise KeyError
    return [counts[-1], len(sent), ddp._join_config.enable]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, 1.0),
    "momentum": lambda params: torch.optim.SGD(params, 1.0, momentum=0.5),
    "zero": lambda params: ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0),
}


def trained(kind: str, optimizer: str, inputs: list[list[float]], hook: Any = None, **options: Any) -> list[float]:
    """This rank's weight after each step, after the context, and after the first step in another context."""
    ddp, own, seen = scalar(), inputs[dist.get_rank()], list[float]()
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    made = OPTIMIZERS[optimizer](ddp.parameters())
    for values in (own, own[:1]):
        with joined(kind, [ddp, made], **options):
            for value in values:
                made.zero_grad()
                ddp(x(value)).backward()
                made.step()
                seen.append(weight(ddp))
        seen.append(weight(ddp))
    return seen[:-1]


def end_of_a_window(kind: str) -> float:
    """Two micro-batches to a step; rank 0 ends within the second window. Seven gradients of 1, by two, make -3.5."""
    ddp = scalar()
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    with joined(kind, [ddp, optimizer]):
        for i in range([3, 4][dist.get_rank()]):
            with contextlib.nullcontext() if i % 2 else ddp.no_sync():
                ddp(x(1.0)).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    return weight(ddp)


def python_reducer(kind: str) -> Any:
    """Its forward pass notifies no Join, which without knowledge of iterations cannot work."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = scalar()
    with pytest.MonkeyPatch.context() as patch:
        calls, kept = [], Join.notify_join_context
        patch.setattr(Join, "notify_join_context", staticmethod(lambda joinable: calls.append(1) or kept(joinable)))
        with joined(kind, [ddp], enable=False):
            ddp(x(1.0)).backward()
    return len(calls)


def unsent(kind: str) -> list[float]:
    """PowerSGD's errors of all ranks add up to the part that is not sent yet; how much more, and the least error."""
    torch.manual_seed(0)
    ddp, state = DistributedDataParallel(nn.Linear(6, 6, bias=False).double()), state_of()
    ddp.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    start, rest = ddp.module.weight.detach().clone(), torch.zeros(6, 6).double()
    g = torch.Generator().manual_seed(dist.get_rank())
    with joined(kind, [ddp, optimizer]):
        for _ in range([3, 6][dist.get_rank()]):
            gradient = torch.randn(6, 6, generator=g).double()
            (ddp(torch.eye(6).double()) * gradient.T).sum().backward()  # whose gradient is this matrix
            rest += gradient
            optimizer.step()
            optimizer.zero_grad()
    kept = sum((error.view(6, 6) for error in state.error_dict.values()), torch.zeros(6, 6).double())
    rest -= kept + start - ddp.module.weight.detach()
    dist.all_reduce(rest)
    return [rest.abs().max().item(), float(kept.abs().max() > 0.1), state.iter]


def added_up(kind: str) -> list[float]:
    """The gradients in the loop of torch's tutorial, which has no zero_grad: rank r has 5 + r inputs."""
    rank, ddp, found = dist.get_rank(), scalar(), []
    with joined(kind, [ddp], divide_by_initial_world_size=False):
        for i in range(5 + rank):
            ddp(x(i + 1.0 + rank)).backward()
            found.append(ddp.module.weight.grad.item())
    return found


LONGER, TWO_AND_FOUR = [[1.0], [1.0, 3.0, 3.0]], [[1.0] * 2, [1.0] * 4]
BY_OWNER = by_rank([-1, -3, -4], [-1, -2, -3, -3, -4])
SUMS = by_rank([-1, -4, -5], [-1, -2.5, -4, -4, -5])
ADDED = by_rank([1.5, 4, 7.5, 12, 17.5], [1.5, 4, 7.5, 12, 17.5, 24.5])
BY_LIVE = by_rank([-1, -2, -4, -5], [-1, -2, -3, -4, -4, -5])
JOINS = {
    "messages in and after the context": Row(messages, [2, 2, True], [1, 0, False]),
    "messages with throw": Row(lambda k: messages(k, throw_on_early_termination=True), [3, 3, True], [1, 0, False]),
    # The documented example. Right is -(1 + 1)/2 - 3/2 - 3/2 = -4; the owner, out of input, takes -1 three times.
    "a stale gradient of the owner": Row(lambda k: trained(k, "zero", LONGER), BY_OWNER, SUMS),
    "the divisor with a hook": Row(
        lambda k: trained(k, "sgd", TWO_AND_FOUR, default_hooks.allreduce_hook, divide_by_initial_world_size=False),
        by_rank([-1, -2, -3, -4], [-1, -2, -2.5, -3, -3, -4]),
        BY_LIVE,
    ),
    "the end of a window": Row(end_of_a_window, -3.0, -3.5),
    "python_reducer": Row(python_reducer, 0, "use fjoin.join(loader)"),
    "optimizers drift: momentum": Row(
        lambda k: trained(k, "momentum", LONGER),
        by_rank([-1, -5.5, -7], [-1, -3, -5.5, -5.5, -7.75]),
        by_rank([-1, -5.5, -7.75], [-1, -3, -5.5, -5.5, -7.75]),
    ),
    # No fault, in either: gradients that add up, of which the last is 7 by one rank with input.
    "gradients that add up": Row(added_up, ADDED, ADDED),
    # No fault, in either: a rank's error changes while it has no input. If it were frozen, the sum would be wrong.
    "PowerSGD's errors without input": Row(unsent, [0.0, 1.0, 6], [0.0, 1.0, 6]),
}

# -- the test ----------------------------------------------------------------------------------------------------------

PARTS = {"hook": HOOKS, "averager": AVERAGERS, "zero": ZERO, "Join": JOINS}
ROWS: dict[str, Row] = {f"{part}: {name}": row for part, rows in PARTS.items() for name, row in rows.items()}


def run(name: str, kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ROWS[name].call(kind)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def same(got: Any, want: Any) -> bool:
    """Words are within a text; numbers agree to 11 bits, which is what float16 keeps; what is not finite agrees."""
    if isinstance(want, str):
        return isinstance(got, str) and want in got
    if isinstance(want, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float) and not math.isfinite(want):
        return isinstance(got, float) and not math.isfinite(got)
    return bool(got == (pytest.approx(want, rel=5e-4) if isinstance(want, (int, float)) else want))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ROWS)
def test_torch_still_has_this_fault_and_ours_has_not(pool: Any, name: str) -> None:
    for kind, want in (("torch", ROWS[name].theirs), ("fjoin", ROWS[name].ours)):
        for rank, got in enumerate(pool.run(ROWS[name].ranks, run, name, kind)):
            assert same(got, want(rank) if callable(want) else want), (kind, rank, got)
