"""Faults of torch's communication hooks, and of its optimizers in hooks, that ours do not have. Where one fails, torch has fixed it."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import SIZES, TORCHS, called, holder
from tests.helpers import raises_text
from tests.optim.test_torch_functional import torchs
from tests.oracle import comm_hooks as oracle
from tests.oracle.comm_hooks import Bucket
from tests.traffic import watched

# -- hooks on buckets: each function gives what torch does wrong, and whether ours is right --------------


def on_both(name: str, value: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The results of torch's hook and of ours for gradients that all have one value, in the first bucket."""
    ddp, params = holder(dtype)
    grads = [torch.full((n,), value, dtype=dtype) for n in SIZES]
    ours = called(ddp, fjoin.ddp.register_ddp_comm_hook(name, ddp), params, grads)
    with oracle.gathers_as_nccl():
        theirs = oracle.run(TORCHS[name], None, params, grads)
    return theirs[0], ours[0]


def large() -> Any:
    """It is cast before it is divided: 5e4 would fit."""
    theirs, ours = on_both("FP16_COMPRESS", 1e5)
    return theirs[0].item(), abs(ours[0].item() - 1e5) < 50


def refused_by_name() -> Any:
    """Under another name torch's function runs on gloo. A build of torch with CUDA takes it."""
    ddp, x = line(), torch.ones(1, 1)
    refused = "BF16 all reduce communication hook required"
    raises_text(TypeError, lambda: register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, ddp), refused)
    ddp.register_comm_hook(None, lambda state, bucket: TORCHS["BF16_COMPRESS"](state, bucket))
    ddp(x).backward()
    other = line()
    fjoin.ddp.register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, other)
    other(x).backward()
    return "refused", torch.equal(ddp.module.weight.grad, other.module.weight.grad)


def quantized_in_gloo(name: str) -> Any:
    ddp, params = holder()
    grads = [torch.ones(n) for n in SIZES]
    raises_text(RuntimeError, lambda: oracle.run(TORCHS[name], None, params, grads), "IndexError")
    ours = called(ddp, fjoin.ddp.register_ddp_comm_hook(name, ddp), params, grads)
    return "IndexError", ours[0].eq(1.0).all().item()


def small(name: str) -> Any:
    """Quantization steps are at least 1.2e-7, and the result is float32 for every dtype of gradients."""
    (theirs, ours), (wide, own) = on_both(name, 5e-8), on_both(name, 1.0, torch.float64)
    right = (ours.abs().max() - 5e-8).abs() < 1e-12 and own.dtype is torch.float64
    return (theirs.abs().max().item(), wide.dtype), bool(right)


def padded() -> Any:
    """512 elements take 1024 bytes and two scales of 8; ours 512, a scale of 5, and weight and counts of 8 each."""
    flat = torch.ones(512)
    with oracle.gathers_as_nccl() as sent:
        TORCHS["QUANTIZE_PER_CHANNEL"](None, Bucket([flat], flat))
    what = tx.explain(fjoin.ddp.comm_hook("QUANTIZE_PER_CHANNEL"), {"w": flat}, {"data": 2})
    return sum(sent), 512 + 5 < what.payload_bytes <= 512 + 8 + 6 * 8


def no_subgroup() -> Any:
    """The first backward pass that needs the subgroup fails. Ours is an axis of a mesh from the beginning."""
    flat, state = torch.ones(4), PostLocalSGDState(None, None, 0)
    raises_text(ValueError, lambda: post_localSGD_hook(state, Bucket([flat], flat)), "only takes effect when CUDA")  # type: ignore[arg-type]
    return "none", True


# -- PowerSGD ------------------------------------------------------------------------------------------


def state_of(**settings: Any) -> power.PowerSGDState:
    return power.PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **settings})


def bucket(*grads: Tensor, index: int = 0, last: bool = True) -> Any:
    return Bucket(grads, torch.cat([g.reshape(-1) for g in grads]), index, last)


def run(state: power.PowerSGDState, *grads: Tensor, hook: Any = power.powerSGD_hook) -> Tensor:
    """The hook's result in the third call, the first compressed one, from the state of the first two calls."""
    while state.iter < 2:
        power.powerSGD_hook(state, bucket(*grads)).wait()
    out: Tensor = hook(state, bucket(*grads)).wait()
    return out


def ours(shapes: Any) -> Any:
    hook = tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0))
    return hook, hook.init({path: torch.zeros(shape) for path, shape in shapes.items()})


ONES, ZEROS, OTHER = torch.ones(6, 6), torch.zeros(6, 6), torch.ones(3)


def zeros_then_ones(feedback: bool) -> Any:
    """NaN from a gradient of zeros on."""
    state = state_of(use_error_feedback=feedback)
    theirs = torch.stack([run(state, ZEROS), *(run(state, ONES) for _ in range(3))])
    with fjoin.bind(fjoin.mesh({"data": -1})):
        hook, own = ours({"w": (6, 6)})
        zeros, own = hook.update({"w": ZEROS}, own)
        ones, _ = hook.update({"w": ONES}, own)
    return theirs.isnan().all().item(), bool((zeros["w"] == 0).all() and (ones["w"] - 1).abs().max() < 1e-5)


def grows() -> Any:
    """The error of gradients that are not compressed grows: each rank's is 1 off the mean, which is 0."""
    state, seen = state_of(), []
    for _ in range(22):
        run(state, ONES, torch.full((3,), 2.0 * dist.get_rank() - 1))
        seen.append(float(state.error_dict[0][36:].abs().max()))
    return seen[21] - seen[11], ours({"w": (6, 6), "b": (3,)})[1].error.keys() == {"w"}


def messages() -> Any:
    """Three messages, even if they are empty; ours are one or two, see reducer/test_power_sgd.py."""
    seen = []
    for grads in ((ONES, OTHER), (ONES,), (OTHER,)):
        run(state := state_of(), *grads)
        with watched() as sent:
            run(state, *grads)
        seen.append([one.elements for one in sent])
    return seen, True


def never_runs() -> Any:
    raises_text(AssertionError, lambda: run(state_of(), ONES, hook=power.batched_powerSGD_hook))
    raises_text(IndexError, lambda: run(state_of(), torch.ones(())), "tuple index out of range")
    return "batched, scalars", True


def resumed() -> Any:
    """Errors are kept by bucket: two in a run, and after it, as in every new module's first pass, both in one."""
    state = state_of()
    for _ in range(4):
        for index, n in enumerate((6, 4)):
            power.powerSGD_hook(state, bucket(torch.ones(n, n), index=index, last=index == 1)).wait()
    loaded = pickle.loads(pickle.dumps(state))
    raises_text(RuntimeError, lambda: power.powerSGD_hook(loaded, bucket(torch.ones(4, 4), ONES)).wait(), "must match")
    return "must match", True


def forgets() -> Any:
    """H7: the callback of one bucket empties both dicts, from which the others' callbacks have yet to read."""
    state = state_of(warm_start=False, use_error_feedback=False)
    state.iter = 2
    state.p_memory_dict[1], state.q_memory_dict[1] = torch.ones(6), torch.ones(6)  # another bucket's, still in use
    power.powerSGD_hook(state, bucket(ONES, last=False)).wait()
    return (sorted(state.p_memory_dict), sorted(state.q_memory_dict)), True


# -- a hook and an optimizer ---------------------------------------------------------------------------


def line() -> Any:
    """A module with one weight of 0, whose gradient on rank r is r + 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def one_pass(ddp: Any) -> float:
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return ddp.module.weight.item()


def returns_a_new_tensor(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: Any = dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
    return done.then(lambda fut: fut.value()[0])


def raises(group: Any, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("lost"))
    return future


def overlapped(hook: Any) -> Any:
    """The weight, which tells the rank's own gradient, and the dtypes of the gradients that torch's optimizer has got."""
    optimizer, seen, ddp = torchs("sgd, plain", lr=1.0), [], line()

    class Spy:
        def step_param(self, param: Tensor, grad: Tensor) -> None:
            seen.append(grad.dtype)
            if grad.dtype is param.dtype:
                optimizer.step_param(param, grad)

    ddp.register_comm_hook(None, _hook_then_optimizer(hook, _OptimizerHookState(Spy())))
    return one_pass(ddp) * (2 - dist.get_rank()), seen


def by_us(kind: str) -> Any:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if kind == "raises":
            raise ValueError("lost")
        half = kind == "fp16"
        return {k: tx.pmean(g.half() if half else g, "data").float() for k, g in grads.items()}, state

    ddp = line()
    fjoin.ddp.register(ddp, tx.fuse(tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES), tx.sgd(1.0)))
    return one_pass(ddp)


def ignored() -> Any:
    """H1: each rank steps with its own gradient, 1 and 2, where their mean is 1.5."""
    return overlapped(returns_a_new_tensor)[0], by_us("new") == -1.5


def lost() -> Any:
    """H2: an error in a hook is lost, and training continues with local gradients."""
    return overlapped(raises)[0], bool(raises_text(Exception, lambda: by_us("raises"), "lost"))


def compressed() -> Any:
    """H3: behind the fp16 wrapper float32 parameters are stepped with float16 gradients."""
    return overlapped(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))[1], by_us("fp16") == -1.5


def composed() -> Any:
    """H9: torch asks a hook for its name and its parameter's, and has no list of hooks; ours need only be transforms."""
    ddp = line()
    raises_text(AttributeError, lambda: ddp.register_comm_hook(None, functools.partial(default_hooks.allreduce_hook, None)))  # fmt: skip
    assert not hasattr(DistributedDataParallel, "register_comm_hooks")
    assert "bucket" in inspect.signature(default_hooks.allreduce_hook).parameters
    hook = tx.chain(tx.stateless(torch.sign), tx.mean("data"), tx.clip_by_value(0.5))
    fjoin.ddp.register(ddp, tx.fuse(hook, tx.partition({"weight": tx.sgd(1.0)})))
    return "AttributeError", one_pass(ddp) == -0.5


TENSOR, CHANNEL = "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"
NO_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch with CUDA takes it")
# Ranks, a function with arguments, and what torch does wrong on each rank.
FAULTS: list[tuple[int, Callable[..., Any], tuple[Any, ...], Any]] = [
    (2, large, (), float("inf")),
    pytest.param(2, refused_by_name, (), "refused", marks=NO_CUDA),  # type: ignore[list-item]
    *((2, quantized_in_gloo, (name,), "IndexError") for name in (TENSOR, CHANNEL)),
    *((2, small, (name,), (0.0, torch.float32)) for name in (TENSOR, CHANNEL)),
    (1, padded, (), 1024 + 16), (2, no_subgroup, (), "none"), (1, forgets, (), ([], [])),
    *((1, zeros_then_ones, (feedback,), True) for feedback in (False, True)), (2, grows, (), 10.0),
    (1, messages, (), [[3, 6, 6], [0, 6, 6], [3, 0, 0]]), (1, never_runs, (), "batched, scalars"), (1, resumed, (), "must match"),
    (2, ignored, (), -2.0), (2, lost, (), -2.0), (2, compressed, (), [torch.float16]), (2, composed, (), "AttributeError"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "function", "args", "fault"), FAULTS)
def test_torch_still_has_this_fault(
    pool: Any, ranks: int, function: Callable[..., Any], args: tuple[Any, ...], fault: Any
) -> None:
    assert pool.run(ranks, function, *args) == [(fault, True)] * ranks


def test_torch_still_replaces_an_overlapped_optimizer_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """H8: torch looks for the registered class among the keys, which are optimizers; ours raises if a key exists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which its import calls
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap
    monkeypatch.setattr(optimizer_overlap, "_registered_overlapped_optims", {})
    known: Any = optimizer_overlap._registered_overlapped_optims
    register = optimizer_overlap.register_overlapped

    class First(nn.Module): ...

    class Second(nn.Module): ...

    register(torch.optim.SGD)(First)
    register(torch.optim.SGD)(Second)
    assert known == {torch.optim.SGD: Second}, "torch refuses a second one now"
    known[First] = First
    raises_text(KeyError, lambda: register(torch.optim.Adam)(First), "Adam")  # in the making of its own message
    raises_text(ValueError, lambda: tx.register_functional_optim(torch.optim.SGD, tx.adam), "SGD")


HANGS = """
import datetime, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
store = "file://" + sys.argv[2]
soon = datetime.timedelta(seconds=3)
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2, timeout=soon)
torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
ddp.register_comm_hook(power.PowerSGDState(None, 1, 2, min_compression_rate=1), power.powerSGD_hook)
for i in range(6):
    if i == 2:
        print("compressing", flush=True)
    ddp(torch.ones(2, 64)).sum().backward()
print("fine")
"""


@pytest.mark.long
def test_torch_hangs_or_aborts_with_several_buckets_on_gloo(tmp_path: Path) -> None:
    """The order of its later messages differs between ranks; ours runs in several buckets in reducer/test_power_sgd.py."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HANGS]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store")], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for r in range(2)
    ]  # fmt: skip
    begun = [rank.stdout.readline() for rank in ranks if rank.stdout]
    ended = []
    for rank in ranks:
        try:
            out, _ = rank.communicate(timeout=3)  # four passes take milliseconds
        except subprocess.TimeoutExpired:
            rank.kill()
            out, _ = rank.communicate()
        ended.append((rank.returncode, out))
    assert begun == [b"compressing\n"] * 2
    assert all(code != 0 and b"fine" not in out for code, out in ended), ended
