"""One call of a function whose intermediate values are computed again in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # type: ignore[attr-defined]

from ._captured import Captured, captured, is_tracked, within
from ._form import remembered
from ._kept import Keeper
from ._min_cut import minimum_cut
from ._offload import HOST, Store
from ._policies import AtPlaces, Keep, Policy, min_cut, nothing_saveable
from ._record import Record
from ._region import Region

_IN_GRAPH = object()
_MOST = 8  # runs that look for tensors that a function uses


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


class How(NamedTuple):
    """How a function is to run.

    policy: Which results to keep.
    store: Where they wait, and the arguments with them; None for the device.
    preserve_rng: Whether a later run has the random numbers of the first.
    """

    policy: Policy
    store: Store | None
    preserve_rng: bool

    def keeper(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Keeper | None:
        """What keeps results in one call."""
        policy = self.policy
        if policy is nothing_saveable:
            return None
        if policy is min_cut:
            policy = AtPlaces(
                remembered(fn, min_cut, args, kwargs, lambda: minimum_cut(fn, self.preserve_rng, args, kwargs))
            )
        if self.store is None:
            return Keeper(policy, Keep.SAVE, HOST)
        return Keeper(policy, Keep.OFFLOAD, self.store)


def call(fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
    """Call a function so that its backward pass runs it again."""
    found = captured(fn)
    for _ in range(_MOST):
        region = Region(fn, args, kwargs, found, Record(how.preserve_rng, how.keeper(fn, args, kwargs)))
        with within(region.tensors) as tensors:
            if region.plain and not (torch.is_grad_enabled() and any(map(is_tracked, tensors))):
                return region.run(tensors)
            try:
                given = tensors if how.store is None else region.shelve(tensors, how.store)
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
