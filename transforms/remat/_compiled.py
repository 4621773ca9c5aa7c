"""Rematerialisation in torch.compile, which has its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._uncompiled import uncompiled
from .surroundings._reach import captured
from .values._policies import everything_saveable, nothing_saveable
from .values._policy import Keep, Policy, keep_of


def compiled(fn: Callable[..., Any], policy: Policy, preserve_rng: bool, args: Any, kwargs: Any) -> Any:
    """Call a function in code that is being compiled."""
    if policy is everything_saveable:
        return fn(*args, **kwargs)
    if policy is nothing_saveable:
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng, **kwargs)

    def of_op(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = keep_of(policy, Keep.SAVE, op, *args, **kwargs)
        if keep is Keep.OFFLOAD:
            raise NotImplementedError(
                f"remat: the policy {policy!r} offloads the result of {op}, which torch.compile cannot; name a place, "
                f"remat(..., offload=), and the function runs uncompiled"
            )
        return CheckpointPolicy.MUST_SAVE if keep is Keep.SAVE else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, of_op)
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng, context_fn=contexts, **kwargs)


_captured = uncompiled(captured)


def reaches_state(fn: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function reaches buffers or other tensors that it may write into; asked when it is compiled.

    torch.compile computes again from what is in a buffer after the write.
    """
    modules = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module))
    return _reaches_state(fn, *modules)


def _reaches_state(fn: Callable[..., Any], *modules: nn.Module) -> bool:
    return bool(_captured(fn, *modules).state)


_reaches_state._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result does
