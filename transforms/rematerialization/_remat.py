"""`remat`, in eager code and in compiled code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..base import checks, devices
from ._flat_call import FlatCall
from ._functional import call_transformed
from ._keeper import Keeper
from ._plain import HooksRefused, PlainRegion
from ._reached import reached
from ._rerun import Rerun
from .checkpoint_policies import OFFLOAD, SAVE, Named, Policy, everything_saveable, keep_of, nothing_saveable

F = TypeVar("F", bound=Callable[..., Any])
Runner: TypeAlias = Callable[[Callable[..., Any], Any, Any], Any]  # fn, args, kwargs -> its result


def remat(fn: F, policy: Policy | None = None, offload: str | None = None, preserve_rng_state: bool = True) -> F:
    """A function whose intermediate values are computed again in the backward pass instead of kept.

    It works in plain autograd, for derivatives of derivatives too, under every transform of torch.func, in
    torch.func.functional_call, and within itself. Results and derivatives are those of `fn`. With forward-mode
    derivatives of torch.func, `fn` runs once more in the forward pass and nothing is kept.

    - Arguments and results are pytrees, whose leaves need not be tensors. In plain autograd a result may be any object.
    - Derivatives by tensors that `fn` uses without taking them, such as the parameters of a module, are right too.
    - The second run has the random numbers of torch, autocast, modes for functions, axes and weight of the first one,
      and the state of modules: buffers that `fn` writes into, such as those of a BatchNorm, and attributes that it sets
      are changed once. Other objects of Python are changed twice, as in torch: keep state in modules, or return it.
    - In torch.compile it is torch.utils.checkpoint, whose policies know no names; a function that reaches buffers, or
      whose values wait elsewhere, is not compiled.

    Args:
        fn: The function, or a module. It must do the same when it runs again.
        policy: Which results of operations to keep, by default none: `dots_saveable`, `save_only_these_names(...)` and
            others by JAX's names, or any function `(op, *args, **kwargs) -> bool` of operations of ATen.
        offload: Where kept values wait, those arguments included that are results of other operations, but no
            parameters: "cpu" for pinned memory of the host, with copies on a stream of their own. By default on their
            device; what a policy offloads by itself waits in pinned memory in either case.
        preserve_rng_state: Whether to keep the state of torch's random number generators for the second run.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        TypeError: no function; another `offload`; raised by the call: under torch.func, a result that is an object of
            an unknown class.
        ValueError: raised by the call: `fn` writes into an argument, or into a tensor that no module holds; values on
            the CPU that "cpu" should move.
        RuntimeError: raised by the call: under torch.func, `fn` uses a tensor that requires a gradient, and that is
            neither an argument nor reached from `fn`; raised in the backward pass: the second run does something else
            than the first.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; jax.checkpoint.

    >>> from fjoin import transforms as tx
    >>> def loss(w, x):
    ...     return torch.tanh(x @ w).sum()
    >>> w, x = torch.ones(2, 2), torch.tensor([[0.5, -0.5]])
    >>> torch.func.grad(tx.remat(loss, tx.checkpoint_policies.dots_saveable))(w, x)
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    if not callable(fn):
        raise TypeError(f"remat: fn must be a function, got {fn!r}")
    run = runner_of(policy, offload, preserve_rng_state)

    @functools.wraps(fn, updated=())
    def again(*args: Any, **kwargs: Any) -> Any:
        return run(fn, args, kwargs)

    return again  # type: ignore[return-value]


def runner_of(
    policy: Policy | None = None, offload: str | None = None, preserve_rng_state: bool = True, early_stop: bool = True
) -> Runner:
    """What calls a function as `remat` with these arguments says.

    Args:
        policy, offload, preserve_rng_state: See `remat`.
        early_stop: Whether a second run in plain autograd ends once it has what gradients use.
    """
    if policy is not None and not callable(policy):
        raise TypeError(f"remat: policy must be a function, got {policy!r}")
    checks.flag("preserve_rng_state", preserve_rng_state)
    checks.flag("early_stop", early_stop)
    if offload not in (None, "cpu"):
        raise TypeError(f"remat: offload must be None or 'cpu', got {offload!r}")
    of_op: Policy = nothing_saveable if policy is None else policy
    offloads = offload is not None or isinstance(policy, Named) and policy.offloads

    def call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        transformed = torch._C._are_functorch_transforms_active()
        nothing_to_do = of_op is everything_saveable and offload is None
        if nothing_to_do or not transformed and not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        flat = FlatCall(fn, args, kwargs)

        def make(cached: bool = False) -> tuple[Rerun, Keeper | None]:
            rerun = Rerun(flat.found, preserve_rng_state, cached)
            if of_op is nothing_saveable:
                return rerun, None
            return rerun, Keeper(of_op, SAVE if offload is None else OFFLOAD)

        if not transformed:
            with contextlib.suppress(HooksRefused):
                return PlainRegion(flat, *make(True), offload is not None, early_stop).first(args, kwargs)
        return call_transformed(flat, *make())

    eager = devices.uncompiled(call)

    def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return call(fn, args, kwargs)
        if offloads or _reaches_state(fn, *(x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module))):
            return eager(fn, args, kwargs)
        return _compiled(fn, of_op, preserve_rng_state, args, kwargs)

    return run


def _compiled(fn: Callable[..., Any], policy: Policy, preserve_rng_state: bool, args: Any, kwargs: Any) -> Any:
    """Call a function in code that is being compiled, by torch's checkpoint."""
    if policy is everything_saveable:
        return fn(*args, **kwargs)

    def of_op(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return keep_of(policy, SAVE, op, *args, **kwargs)

    more: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state, **kwargs}
    if policy is not nothing_saveable:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, of_op)
    return checkpoint(fn, *args, **more)


_reached = devices.uncompiled(reached)


@devices.constant
def _reaches_state(fn: Callable[..., Any], *modules: nn.Module) -> bool:
    """Whether a function reaches buffers or other tensors that it may write into: torch.compile computes again from
    what is in them after the write.
    """
    return any(not x.requires_grad for x in _reached(fn, *modules).tensors)
