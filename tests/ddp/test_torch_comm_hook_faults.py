"""Faults of torch's communication hooks that ours do not have. Where one of these fails, torch has fixed it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.comm_hook_problem import SIZES, TORCHS, called, holder
from tests.helpers import raises_text
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
