"""Rematerialisation: a function whose intermediate values are computed again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # type: ignore[attr-defined]

from .._check import flag
from ._captured import Captured, captured, is_tracked, within
from ._compiled import compiled
from ._kept import Keeper
from ._offload import HOST, Offload, Store, store_for
from ._policies import Keep, Named, Policy, everything_saveable, nothing_saveable
from ._record import Record
from ._region import Region

_IN_GRAPH = object()
_MOST = 8  # runs that look for tensors that a function uses
F = TypeVar("F", bound=Callable[..., Any])


class _Again(torch.autograd.Function):
    """Runs a region, and again for each derivative."""

    @staticmethod
    def forward(region: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(region.first(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        region, *tensors = inputs
        ctx.region, ctx.inputs, kept = region, len(tensors), region.record.keeper
        if kept is None or not region.plain:
            ctx.save_for_backward(*tensors)
        else:  # by the graph, like all that it saves
            ctx.save_for_backward(*tensors, *(x for x in kept.values if isinstance(x, Tensor)))
            ctx.kept, kept.values = [_IN_GRAPH if isinstance(x, Tensor) else x for x in kept.values], []
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        region, saved = ctx.region, _alive(ctx.saved_tensors)
        tensors = saved[: ctx.inputs]
        if region.plain and region.record.keeper is not None:
            own = iter(saved[ctx.inputs :])
            region.record.values = [next(own) if x is _IN_GRAPH else x for x in ctx.kept]
        moving = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
        if _transformed((*tensors, *grads)) or torch.is_grad_enabled():
            found = _by_vjp(region, tensors, moving, grads)
        else:
            moving = [i for i in moving if ctx.needs_input_grad[1 + i]]
            found = _by_autograd(region, tensors, moving, grads)
            if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
                ctx.kept, region.record.values, region.shelves = [], [], {}
        out: list[Any] = [None] * len(tensors)
        for i, grad in zip(moving, found, strict=True):
            out[i] = grad
        return None, *out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, ctx.saved_tensors
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def of(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(region.again(_with(tensors, moving, values)))

        primals, moved = [tensors[i] for i in moving], [tangents[i] for i in moving]
        with _below(primals, moved) as (primals, moved), _set_fwd_grad_enabled(True):
            return cast("tuple[Any, ...]", torch.func.jvp(of, tuple(primals), tuple(moved))[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: Any, *tensors: Tensor) -> tuple[Any, Any]:
        out = _Again.apply(region.batched(in_dims[1:], info.randomness), *tensors)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)


def _with(tensors: Any, places: list[int], values: Any) -> list[Tensor]:
    new = list(tensors)
    for i, value in zip(places, values, strict=True):
        new[i] = value
    return new


def _alive(tensors: Any) -> list[Tensor]:
    """The tensors without the wrappers of transforms that have ended."""
    return [torch._C._functorch.unwrap_if_dead(x) for x in tensors]


@contextlib.contextmanager
def _below(*groups: list[Any]) -> Iterator[Any]:
    """A context in which the innermost transform is inactive, with the values that tensors have there.

    A forward-mode derivative within a forward-mode derivative needs it: each level may have one tangent.
    """
    if not torch._C._are_functorch_transforms_active():
        yield groups
        return
    inner = retrieve_current_functorch_interpreter()
    level = inner.level()
    with inner.lower():
        yield [[torch._C._functorch._unwrap_for_grad(x, level) for x in group] for group in groups]


def _transformed(tensors: Any) -> bool:
    """Whether torch.func transforms are active, or were when these tensors were made."""
    return bool(torch._C._are_functorch_transforms_active()) or any(
        torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors if x is not None
    )


def _by_vjp(region: Any, tensors: Any, moving: list[int], grads: Any) -> Any:
    """The gradients under torch.func transforms, or for a gradient of a gradient."""
    kept: list[int] = []

    def of(*values: Tensor) -> tuple[Tensor, ...]:
        out = region.again(_with(tensors, moving, values))
        kept[:] = [i for i, x in enumerate(out) if x.is_floating_point() or x.is_complex()]
        return tuple(out[i] for i in kept)

    vjp: Any = torch.func.vjp(of, *(tensors[i] for i in moving))[1]
    return vjp(tuple(grads[i] for i in kept))


def _by_autograd(region: Any, tensors: Any, moving: list[int], grads: Any) -> Any:
    """The gradients in a plain backward pass."""
    values = [x.detach() for x in tensors]
    for i in moving:
        values[i].requires_grad_()
    with torch.enable_grad():
        out = region.again(values, whole=False)
    used = [(x, grad) for x, grad in zip(out, grads, strict=True) if x.requires_grad and grad is not None]
    if not used or not moving:
        return [None] * len(moving)
    ends, starts = zip(*used, strict=True)
    return torch.autograd.grad(ends, [values[i] for i in moving], starts, allow_unused=True)


def remat(fn: F, policy: Policy | None = None, offload: Offload | None = None, preserve_rng: bool = True) -> F:
    """A function whose intermediate values are computed again in the backward pass instead of kept.

    It works in plain autograd, for derivatives of derivatives too, under every transform of torch.func, in
    torch.func.functional_call, and within itself. Results and derivatives are those of `fn`. With forward-mode
    derivatives `fn` runs once more in the forward pass, and nothing is kept.

    - Arguments and results are pytrees; arguments need not be tensors.
    - Derivatives by tensors that `fn` uses without taking them, such as the parameters of a module, are right too.
    - The second run has the random numbers, autocast, axes and weight of the first one, and buffers that `fn` writes
      into, such as those of a BatchNorm, are written once.
    - In torch.compile it is torch.utils.checkpoint, whose policies know no names; where values wait elsewhere, the
      function is not compiled.

    Args:
        fn: The function, or a module. It must do the same when it runs again.
        policy: Which results of operations to keep, by default none: `dots_saveable`, `save_only_these_names(...)` and
            others by JAX's names, or any function `(op, *args, **kwargs) -> bool` of operations of ATen.
        offload: Where kept values wait, those arguments included that are results of other operations, but no parameters:
            "cpu" for pinned memory of the host, with copies on a stream of their own; the path of a folder, for
            memory-mapped files without names; a codec such as `int8()`, for fewer bytes in place. By default on their
            device; what a policy offloads by itself then waits in pinned memory.
        preserve_rng: Whether to keep the state of torch's random number generators for the second run.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        TypeError: no function; an `offload` of another type; raised by the call: a result that is no tensor; a
            torch.Generator used inside.
        ValueError: a folder that does not exist; raised by the call: `fn` writes into an argument; values on the CPU that
            "cpu" should move.
        NotImplementedError: in torch.compile, a policy of one's own that offloads.
        RuntimeError: raised in the backward pass: the second run does something else than the first.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; jax.checkpoint.

    >>> from fjoin import transforms as tx
    >>> def loss(w, x):
    ...     return torch.tanh(x @ w).sum()
    >>> w, x = torch.ones(2, 2), torch.tensor([[0.5, -0.5]])
    >>> torch.func.grad(tx.remat(loss, tx.dots_saveable))(w, x)
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    for name, value in (("fn", fn), ("policy", policy)):
        if not callable(value) and not (name == "policy" and value is None):
            raise TypeError(f"remat: {name} must be a function, got {value!r}")
    flag("preserve_rng", preserve_rng)
    chosen: Policy = nothing_saveable if policy is None else policy
    if chosen is everything_saveable and offload is None:
        return fn
    store: Store
    meaning, store = (Keep.SAVE, HOST) if offload is None else (Keep.OFFLOAD, store_for(offload))

    def run(*args: Any, **kwargs: Any) -> Any:
        found = captured(fn)
        for _ in range(_MOST):
            keeper = None if chosen is nothing_saveable else Keeper(chosen, meaning, store)
            region = Region(fn, args, kwargs, found, Record(preserve_rng, keeper))
            with within(region.tensors) as tensors:
                if region.plain and not (torch.is_grad_enabled() and any(map(is_tracked, tensors))):
                    return region.run(tensors)
                try:
                    given = tensors if offload is None else region.shelve(tensors, store)
                    out = _Again.apply(region, *given)  # type: ignore[no-untyped-call]
                    break
                except Captured as more:
                    found.tracked.update({id(x): x for x in more.found})
        else:
            raise RuntimeError(
                f"remat: each of {_MOST} runs of {fn!r} has used other tensors that require a gradient; pass them as arguments"
            )
        form, places = region.record.result
        of = {"argument": tensors, "result": out}
        return optree.tree_unflatten(form, [of[kind][i] for kind, i in places])

    moves = offload is not None or isinstance(policy, Named) and policy.offloads
    if moves:
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]

    def again(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not moves:
            return compiled(fn, chosen, preserve_rng, args, kwargs)
        return run(*args, **kwargs)

    names = functools.WRAPPER_ASSIGNMENTS if isinstance(fn, types.FunctionType) else ()
    return cast(F, functools.update_wrapper(again, fn, names, ()))
