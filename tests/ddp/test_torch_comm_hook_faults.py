"""Faults of torch's communication hooks, and of its optimizers in hooks, that ours do not have. A test that fails: torch has fixed it."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import SIZES, TORCHS, called, holder
from tests.helpers import raises_text
from tests.optim.test_torch_functional import torchs
from tests.oracle import comm_hooks as oracle
from tests.oracle.comm_hooks import Bucket
from tests.oracle.whole_batch import make_model


def on_both(name: str, value: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The results of torch's hook and of ours for gradients that all have one value, in the first bucket."""
    ddp, params = holder(dtype)
    grads = [torch.full((n,), value, dtype=dtype) for n in SIZES]
    ours = called(ddp, fjoin.ddp.register_ddp_comm_hook(name, ddp), params, grads)
    with oracle.gathers_as_nccl():
        theirs = oracle.run(TORCHS[name], None, params, grads)
    return theirs[0], ours[0]


def large() -> Any:
    return [x[0].item() for x in on_both("FP16_COMPRESS", 1e5)]


def test_a_large_gradient_is_still_infinite_in_float16(pool: Any) -> None:
    """It is cast before it is divided: 5e4 would fit."""
    for theirs, ours in pool.run(2, large):
        assert theirs == float("inf"), "torch divides before it casts now"
        assert abs(ours - 1e5) < 50


def named() -> Any:
    ddp = DistributedDataParallel(make_model())
    reported = raises_text(TypeError, lambda: register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, ddp))

    def any_other_name(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return TORCHS["BF16_COMPRESS"](state, bucket)

    any_other_name.__annotations__ = {}
    ddp.register_comm_hook(None, any_other_name)
    ddp(torch.ones(1, 5).double()).sum().backward()
    theirs = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
    ddp = DistributedDataParallel(make_model())
    fjoin.ddp.register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, ddp)
    ddp(torch.ones(1, 5).double()).sum().backward()
    ours = [p.grad for p in ddp.parameters() if p.grad is not None]
    return reported, all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch with CUDA takes it")
def test_bfloat16_is_still_refused_by_the_name_of_a_function(pool: Any) -> None:
    """Under another name it runs on gloo."""
    for reported, equal in pool.run(2, named):
        assert "BF16 all reduce communication hook required" in reported and equal


def quantized_in_gloo(name: str) -> Any:
    ddp, params = holder()
    grads = [torch.ones(n) for n in SIZES]
    reported = raises_text(RuntimeError, lambda: oracle.run(TORCHS[name], None, params, grads))
    ours = called(ddp, fjoin.ddp.register_ddp_comm_hook(name, ddp), params, grads)
    return reported, ours[0].eq(1.0).all().item()


@pytest.mark.parametrize("name", ["QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"])
def test_quantization_still_expects_futures_of_nccl(pool: Any, name: str) -> None:
    for reported, fine in pool.run(2, quantized_in_gloo, name):
        assert "IndexError" in reported, "torch takes gloo's futures now"
        assert fine


def small(name: str) -> Any:
    return [x.abs().max().item() for x in on_both(name, 5e-8)], [
        str(x.dtype) for x in on_both(name, 1.0, torch.float64)
    ]


@pytest.mark.parametrize("name", ["QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"])
def test_torch_still_quantizes_small_gradients_to_zero(pool: Any, name: str) -> None:
    """Quantization steps are at least 1.2e-7, and the result is float32 for every dtype of gradients."""
    for (theirs, ours), dtypes in pool.run(2, small, name):
        assert theirs == 0.0, "torch has smaller steps now"
        assert abs(ours - 5e-8) < 1e-12
        assert dtypes == ["torch.float32", "torch.float64"]


def padded(n: int) -> Any:
    flat = torch.ones(n)
    with oracle.gathers_as_nccl() as sent:
        TORCHS["QUANTIZE_PER_CHANNEL"](None, Bucket([flat], flat))
    what = tx.explain(fjoin.ddp.comm_hook("QUANTIZE_PER_CHANNEL"), {"w": flat}, {"data": 2})
    return sum(sent), what.payload_bytes


def test_torch_still_sends_an_empty_channel(pool: Any) -> None:
    """512 elements take 1024 bytes and two scales of 8; ours 512, a scale of 5, and weight and counts of 8 each."""
    ((theirs, ours),) = pool.run(1, padded, 512)
    assert theirs == 1024 + 16, "torch pads to whole channels now"
    assert 512 + 5 < ours <= 512 + 8 + 6 * 8


def no_subgroup() -> str:
    flat = torch.ones(4)
    state = PostLocalSGDState(None, None, 0)
    return raises_text(ValueError, lambda: post_localSGD_hook(state, Bucket([flat], flat)))  # type: ignore[arg-type]


def test_a_subgroup_is_still_not_found_without_a_gpu(pool: Any) -> None:
    """The first backward pass that needs the subgroup fails. Ours is an axis of a mesh from the beginning."""
    for reported in pool.run(2, no_subgroup):
        assert "only takes effect when CUDA" in reported, "torch finds one now"


def forgets() -> Any:
    state = PowerSGDState(
        None, start_powerSGD_iter=2, min_compression_rate=1, warm_start=False, use_error_feedback=False
    )  # fmt: skip
    state.iter, flat = 2, torch.ones(36)
    param = torch.zeros(6, 6)
    state.p_memory_dict[1], state.q_memory_dict[1] = torch.ones(6), torch.ones(6)  # another bucket's, still in use
    powerSGD_hook(state, Bucket([param], flat, 0, False)).wait()  # type: ignore[arg-type]
    return sorted(state.p_memory_dict), sorted(state.q_memory_dict)


def test_torch_still_clears_the_state_of_other_buckets(pool: Any) -> None:
    """H7: the callback of one bucket empties both dicts, from which the others' callbacks have yet to read."""
    assert pool.run(1, forgets) == [([], [])], "torch forgets one bucket now"


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


def line() -> Any:
    """A module with one weight of 0, whose gradient on rank r is r + 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return DistributedDataParallel(model)


def one_pass(ddp: Any) -> float:
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return ddp.module.weight.item()


def returns_a_new_tensor(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    total = bucket.buffer() / 2
    done: Any = dist.all_reduce(total, async_op=True).get_future()
    return done.then(lambda fut: fut.value()[0])


def with_torch(kind: str) -> Any:
    hooks = {
        "new": returns_a_new_tensor,
        "raises": lambda group, bucket: _raises(),
        "fp16": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    }
    ddp, seen = line(), []
    optimizer = torchs("sgd, plain", lr=1.0)
    stepped = optimizer.step_param

    class Spy:
        def step_param(self, param: Tensor, grad: Tensor) -> None:
            seen.append(grad.dtype)
            if grad.dtype is param.dtype:
                stepped(param, grad)

    ddp.register_comm_hook(None, _hook_then_optimizer(hooks[kind], _OptimizerHookState(Spy())))
    return one_pass(ddp), seen


def _raises() -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("lost"))
    return future


def with_ours(kind: str) -> Any:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if kind == "raises":
            raise ValueError("lost")
        return {
            k: tx.pmean(g.half(), "data").float() if kind == "fp16" else tx.pmean(g, "data") for k, g in grads.items()
        }, state

    ddp = line()
    hook = tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES)
    fjoin.ddp.register(ddp, tx.fuse(hook, tx.sgd(1.0)))
    try:
        return one_pass(ddp)
    except Exception as error:
        return str(error)


def test_torch_optimizer_still_ignores_the_result_of_a_hook(pool: Any) -> None:
    """H1: each rank steps with its own gradient, 1 and 2, where their mean is 1.5."""
    assert [weight for weight, _ in pool.run(2, with_torch, "new")] == [-1.0, -2.0], "torch steps with the result now"
    assert pool.run(2, with_ours, "new") == [-1.5, -1.5]


def test_an_error_in_a_hook_is_still_lost(pool: Any) -> None:
    """H2: training continues with local gradients."""
    assert [weight for weight, _ in pool.run(2, with_torch, "raises")] == [-1.0, -2.0], "torch raises now"
    assert all("lost" in reported for reported in pool.run(2, with_ours, "raises"))


def test_torch_still_steps_with_the_compressed_gradient(pool: Any) -> None:
    """H3: behind the fp16 wrapper float32 parameters are stepped with float16 gradients."""
    assert all(seen == [torch.float16] for _, seen in pool.run(2, with_torch, "fp16")), "torch casts back first now"
    assert pool.run(2, with_ours, "fp16") == [-1.5, -1.5]


def composed() -> Any:
    """A function applied, a chain, a hook with an optimizer: nothing is asked of a hook but that it is a transform."""
    ddp = line()
    try:
        import functools

        ddp.register_comm_hook(None, functools.partial(default_hooks.allreduce_hook, None))
    except Exception as error:
        refused = type(error).__name__
    hook = tx.chain(tx.stateless(torch.sign), tx.mean("data"), tx.clip_by_value(0.5))
    fjoin.ddp.register(ddp, tx.fuse(hook, tx.partition({"weight": tx.sgd(1.0)})))
    return refused, one_pass(ddp)


def test_hooks_are_still_not_composed(pool: Any) -> None:
    """H9: torch asks a hook for its name and its parameter's, and has no list of hooks."""
    assert not hasattr(DistributedDataParallel, "register_comm_hooks")
    assert "bucket" in inspect.signature(default_hooks.allreduce_hook).parameters
    assert pool.run(2, composed) == [("AttributeError", -0.5)] * 2
