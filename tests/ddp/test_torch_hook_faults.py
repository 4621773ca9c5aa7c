"""Faults of torch's optimizers in hooks that ours do not have. Where one of these fails, torch has fixed it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.optim.test_torch_functional import torchs


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
