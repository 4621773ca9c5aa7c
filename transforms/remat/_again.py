"""One call of a function whose intermediate values are computed again in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # type: ignore[attr-defined]

from ._messages import refuse_iterators
from ._plain import HooksRefused, PlainRegion
from ._pullback import is_differentiable, with_graph, with_values
from ._region import Region
from .record._kept import Keeper
from .record._record import Record
from .surroundings._captured import Captured, within
from .surroundings._reach import captured
from .surroundings._result import rebuilt
from .surroundings._surroundings import function_modes
from .values._pinned import HOST
from .values._policies import everything_saveable, nothing_saveable
from .values._policy import Keep, Policy
from .values._store import Store

_MOST = 8  # runs that look for tensors that a function uses


class _Again(torch.autograd.Function):
    """Runs a region, and again for each derivative."""

    @staticmethod
    def forward(region: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(region.first(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.region, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        moving = [i for i, x in enumerate(tensors) if ctx.needs_input_grad[i + 1] and is_differentiable(x)]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        out: list[Any] = [None] * len(tensors)
        if used and moving:

            def of(*values: Tensor) -> tuple[Tensor, ...]:
                results = region.again(with_values(tensors, moving, values))
                return tuple(results[i] for i in used)

            pullback = with_graph(of, [tensors[i] for i in moving], bool(region.levels))[1]
            for i, grad in zip(moving, pullback([grads[i] for i in used]), strict=True):  # type: ignore[misc]
                out[i] = grad
        return None, *out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        region, tensors = ctx.region, ctx.saved_tensors
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def of(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(region.again(with_values(tensors, moving, values)))

        primals, moved = [tensors[i] for i in moving], [tangents[i] for i in moving]
        with _below(primals, moved) as (primals, moved), _set_fwd_grad_enabled(True):
            return cast("tuple[Any, ...]", torch.func.jvp(of, tuple(primals), tuple(moved))[1])

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: Any, *tensors: Tensor) -> tuple[Any, Any]:
        out = _Again.apply(region.batched(in_dims[1:], info.randomness), *tensors)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)


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


class How(NamedTuple):
    """How a function is to run.

    policy: Which results to keep.
    store: Where they wait, and the arguments with them; None for the device.
    preserve_rng: Whether a later run has the random numbers of the first.
    early_stop: Whether a later run in plain autograd ends once it has what gradients use.
    """

    policy: Policy
    store: Store | None
    preserve_rng: bool
    early_stop: bool = True

    def keeper(self) -> Keeper | None:
        """What keeps results in one call."""
        if self.policy is nothing_saveable:
            return None
        if self.store is None:
            return Keeper(self.policy, Keep.SAVE, HOST)
        return Keeper(self.policy, Keep.OFFLOAD, self.store)


def call(fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
    """Call a function so that its backward pass runs it again."""
    if how.policy is everything_saveable and how.store is None:
        return fn(*args, **kwargs)
    refuse_iterators(args, kwargs)
    if torch._C._are_functorch_transforms_active():
        return _call_transformed(fn, how, args, kwargs)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    found = captured(fn, args, kwargs)
    record = Record(how.preserve_rng, found.places, how.keeper())
    try:
        return PlainRegion(fn, args, kwargs, found, record, how.store, how.early_stop).first(args, kwargs)
    except HooksRefused:
        return _call_transformed(fn, how, args, kwargs)


def _call_transformed(fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
    found = captured(fn, args, kwargs)
    for _ in range(_MOST):
        record = Record(how.preserve_rng, found.places, how.keeper(), uncached=True)
        region = Region(fn, args, kwargs, found, record)
        try:
            with within(region.tensors) as tensors, function_modes(()):
                out = _Again.apply(region, *tensors)  # type: ignore[no-untyped-call]
            break
        except Captured as more:
            record.undo()
            found.tracked.update({id(x): x for x in more.found})
    else:
        raise RuntimeError(
            f"remat: each of {_MOST} runs of {fn!r} has used other tensors that require a gradient; pass them as arguments"
        )
    region.tensors = []
    of = {"argument": tensors, "result": out}
    return rebuilt(record.result, lambda place: of[place.kind][place.number])
