"""Faults of torch that ours does not have. Each row asserts torch's faulty number, and the right one of ours.

Where a row fails on torch's side, torch has mended it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import pickle
import re
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
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import SIZES, TORCHS, called, holder
from tests.optim import averager_problem
from tests.oracle import comm_hooks as oracle
from tests.oracle.comm_hooks import Bucket
from tests.ranks import Ranks
from tests.traffic import watched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of torch.jit
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

Params = nn.Parameter
F16, F32, F64 = torch.float16, torch.float32, torch.float64
UNTRIED = "there is nothing of ours to call"


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


def registered_by_name(kind: str) -> float:
    ddp = line()
    register = register_ddp_comm_hook if kind == "torch" else fjoin.ddp.register_ddp_comm_hook
    register(DDPCommHookType.BF16_COMPRESS, ddp)
    ddp(torch.ones(1, 1)).backward()
    return ddp.module.weight.grad.item()


def no_subgroup(kind: str) -> Any:
    """The first backward pass that needs the subgroup fails. Ours is an axis of a mesh from the beginning."""
    flat, state = torch.ones(4), PostLocalSGDState(None, None, 0)
    return post_localSGD_hook(state, Bucket([flat], flat))  # type: ignore[arg-type]


ONES, ZEROS, OTHER = torch.ones(6, 6), torch.zeros(6, 6), torch.ones(3)


def state_of(**settings: Any) -> power.PowerSGDState:
    return power.PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **settings})


def bucket(*grads: Tensor, index: int = 0, last: bool = True) -> Any:
    return Bucket(grads, torch.cat([g.reshape(-1) for g in grads]), index, last)


def compressed(state: power.PowerSGDState, *grads: Tensor, hook: Any = power.powerSGD_hook) -> Tensor:
    """The hook's result in the third call, the first compressed one, from the state of the first two calls."""
    while state.iter < 2:
        power.powerSGD_hook(state, bucket(*grads)).wait()
    out: Tensor = hook(state, bucket(*grads)).wait()
    return out


POWER = tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0))


def zeros_then_ones(kind: str) -> list[float]:
    """NaN from a gradient of zeros on."""
    if kind == "torch":
        state = state_of()
        return [compressed(state, grads)[0].item() for grads in (ZEROS, ONES, ONES)]
    with fjoin.bind(fjoin.mesh({"data": -1})):
        own, seen = POWER.init({"w": ZEROS}), []
        for grads in (ZEROS, ONES, ONES):
            out, own = POWER.update({"w": grads}, own)
            seen.append(out["w"][0, 0].item())
    return seen


def resumed(kind: str) -> Any:
    """Errors are kept by bucket: two in a run, and after it, as in every new module's first pass, both in one."""
    state = state_of()
    for _ in range(4):
        for index, n in enumerate((6, 4)):
            power.powerSGD_hook(state, bucket(torch.ones(n, n), index=index, last=index == 1)).wait()
    loaded = pickle.loads(pickle.dumps(state))
    return power.powerSGD_hook(loaded, bucket(torch.ones(4, 4), ONES)).wait()


def forgets(kind: str) -> Any:
    """The callback of one bucket empties both dicts, from which the others' callbacks have yet to read."""
    state = state_of(warm_start=False, use_error_feedback=False)
    state.iter = 2
    state.p_memory_dict[1], state.q_memory_dict[1] = torch.ones(6), torch.ones(6)  # another bucket's, still in use
    power.powerSGD_hook(state, bucket(ONES, last=False)).wait()
    return [sorted(state.p_memory_dict), sorted(state.q_memory_dict)]


TENSOR, CHANNEL = "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"
REFUSED = "BF16 all reduce communication hook required"
HOOKS = {
    "fp16: cast before it is divided": Row(lambda k: hooked(k, "FP16_COMPRESS", 1e5)[0].item(), math.inf, 1e5),
    "bf16: refused by name": Row(registered_by_name, REFUSED if torch.version.cuda is None else 1.0, 1.0),
    "quantized in gloo": Row(lambda k: hooked(k, TENSOR, 1.0, nccl=False)[0].item(), "IndexError", 1.0),
    "steps are at least 1.2e-7": Row(lambda k: hooked(k, TENSOR, 5e-8).abs().max().item(), 0.0, 5e-8),
    "float32 for every dtype": Row(lambda k: hooked(k, TENSOR, 1.0, F64).dtype, F32, F64),
    "no subgroup": Row(no_subgroup, "only takes effect when CUDA", UNTRIED),
    "NaN after zeros": Row(zeros_then_ones, [math.nan] * 3, [0.0, 1.0, 1.0], 1),
    "batched: never runs": Row(
        lambda k: compressed(state_of(), ONES, hook=power.batched_powerSGD_hook), "AssertionError", UNTRIED, 1,
    ),
    "resumed": Row(resumed, "must match", UNTRIED, 1),
    "memory of other buckets is dropped": Row(forgets, [[], []], UNTRIED, 1),
}  # fmt: skip

# -- a hook and an optimizer -------------------------------------------------------------------------------------------


def line() -> Any:
    """A module with one weight of 0, whose gradient is its input."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def one_pass(ddp: Any) -> float:
    """The weight after a pass with the gradient r + 1 on rank r."""
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return ddp.module.weight.item()


def composed(kind: str) -> float:
    """torch asks a hook for its name and its parameter's, and has no list of hooks; ours need only be transforms."""
    ddp = line()
    if kind == "torch":
        ddp.register_comm_hook(None, functools.partial(default_hooks.allreduce_hook, None))
    hook = tx.chain(tx.stateless(torch.sign), tx.mean("data"), tx.clip_by_value(0.5))
    fjoin.ddp.register(ddp, tx.fuse(hook, tx.partition({"weight": tx.sgd(1.0)})))
    return one_pass(ddp)


OVERLAPS = {
    "hooks do not compose": Row(composed, "AttributeError", -0.5),
}

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


def added_up(kind: str, zero_grad: bool, **settings: Any) -> list[float]:
    """The gradients in the loop of torch's tutorial, which has no zero_grad: rank r has 5 + r inputs."""
    rank, ddp, found = dist.get_rank(), scalar(), []
    with joined(kind, [ddp], **settings):
        for i in range(5 + rank):
            if zero_grad:
                ddp.zero_grad()
            ddp(x(i + 1.0 + rank)).backward()
            found.append(ddp.module.weight.grad.item())
    return found


LONGER, TWO_AND_FOUR = [[1.0], [1.0, 3.0, 3.0]], [[1.0] * 2, [1.0] * 4]
BY_OWNER = by_rank([-1, -3, -4], [-1, -2, -3, -3, -4])
SUMS = by_rank([-1, -4, -5], [-1, -2.5, -4, -4, -5])
MEANS = by_rank([1.5, 2.5, 3.5, 4.5, 5.5], [1.5, 2.5, 3.5, 4.5, 5.5, 3.5])
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
    # No fault, in either: gradients that add up, of which the last is 7 by one rank with input, or by two.
    "gradients that add up": Row(lambda k: added_up(k, False, divide_by_initial_world_size=False), ADDED, ADDED),
    "gradients that do not": Row(lambda k: added_up(k, True), MEANS, MEANS),
    # No fault, in either: a rank's error changes while it has no input. If it were frozen, the sum would be wrong.
    "PowerSGD's errors without input": Row(unsent, [0.0, 1.0, 6], [0.0, 1.0, 6]),
}

# -- the test ----------------------------------------------------------------------------------------------------------

ROWS: dict[str, Row] = {
    f"{part}: {name}": row
    for part, rows in {
        "hook": HOOKS, "overlap": OVERLAPS, "averager": AVERAGERS, "zero": ZERO, "Join": JOINS,
    }.items() for name, row in rows.items()
}  # fmt: skip


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
        if want is not UNTRIED:
            for rank, got in enumerate(pool.run(ROWS[name].ranks, run, name, kind)):
                assert same(got, want(rank) if callable(want) else want), (kind, rank, got)


# -- programs that hang or abort in torch's Join, in processes of their own --------------------------------------------


# A program, and the iterations of each rank. Ours run in tests/uneven (test_join_ddp, test_loop, test_failures), and the last one
# in reducer/test_power_sgd.py.
HANGS = {
    "zero first": [1, 3], "no_sync": [0, 2, 2], "eval": [1, 3], "local sgd": [1, 3], "buffer hook": [1, 3], "in forward": [1, 3],
    "exception": [3, 3], "power sgd": [6, 6],
}  # fmt: skip


def in_a_join(name: str, rank: int, even: bool) -> tuple[Any, Callable[[int], None]]:
    """The joinables, and the body of the loop; some ranks do other things in it where they are not even."""
    ddp, batch, optimizer = scalar(), x(1.0), None
    if name == "zero first":
        optimizer = OPTIMIZERS["zero"](ddp.parameters())
    elif name == "local sgd":  # each rank steps with its own gradients, and parameters are averaged after every step
        state = PostLocalSGDState(None, dist.new_subgroups(1)[0], 0, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, post_localSGD_hook)
        averages = averager("torch", "periodic", 1, 0)
        optimizer = PostLocalSGDOptimizer(OPTIMIZERS["sgd"](ddp.parameters()), averages)
    elif name == "buffer hook":  # buffers averaged by a hook after each forward pass
        batch, ddp = batch.expand(2, 1), DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(1)).double())
        ddp._register_buffer_comm_hook(None, lambda _, named: dist.all_reduce(named["0.running_mean"]))
    elif name == "power sgd":  # several buckets: the order of its messages differs between ranks once it compresses
        batch = torch.ones(2, 64)
        ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.01)
        ddp.register_comm_hook(state_of(start_powerSGD_iter=9 if even else 2), power.powerSGD_hook)

    def body(i: int) -> None:
        if name == "exception" and (rank, i, even) == (1, 1, False):
            raise ValueError("bad batch")
        if name == "in forward":
            dist.all_reduce(torch.ones(1))
        with ddp.no_sync() if name == "no_sync" and (rank, i, even) == (1, 0, False) else contextlib.nullcontext():
            ddp(batch).sum().backward()
        if name == "eval" and (rank == 1 or even):
            with torch.no_grad():
                ddp(batch)
        if optimizer is not None:
            optimizer.step()

    return {"zero first": [optimizer, ddp], "power sgd": []}.get(name, [ddp]), body


def _run(rank: int, report: Any, name: str, even: bool) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    joinables, body = in_a_join(name, rank, even)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)
    report("started")
    try:
        with Join(joinables) if joinables else contextlib.nullcontext():
            for i in range(max(HANGS[name]) if even else HANGS[name][rank]):
                body(i)
        report("fine")
    except Exception as error:
        report(f"{type(error).__name__}: {error}")


def outcomes(name: str, even: bool) -> list[Any]:
    """The last report of each rank; a process that hangs or aborts has only "started"."""
    n = len(HANGS[name])
    with Ranks(n, _run, name, even) as ranks:
        found: dict[int, Any] = {}
        with contextlib.suppress(AssertionError):
            for _ in range(2 * n):
                rank, _, value = ranks.next(60.0 if len(found) < n else 30.0 if even else 7.0)
                found[rank] = value
        return [found[rank] for rank in range(n)]


STUCK = re.compile(
    r"fine|started|ValueError: bad batch|RuntimeError: .*(Timed out|Connection (closed|reset)|timeout)", re.S
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", HANGS)
def test_torch_still_hangs_or_aborts(name: str) -> None:
    """On even inputs torch's Join works, so that it fails, and not the program."""
    assert outcomes(name, even=True) == ["fine"] * len(HANGS[name])
    values = outcomes(name, even=False)
    assert all(map(STUCK.match, values)) and set(values) - {"fine", "ValueError: bad batch"}, values
    assert name != "exception" or ("bad batch" not in values[0] and values[1] == "ValueError: bad batch")
