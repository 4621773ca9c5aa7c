"""Pipelines that leave steps out: `skip_if_nonfinite`, `dynamic_loss_scale`."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..base import Call, Count, Facts, State, Transform, Tree, check_transform, factory, own_state, trees
from ..optimizers import Optimizer
from ._fuse import pipeline_of
from ._pipeline import Pipeline, Skips


class SkipState(NamedTuple):
    inner: State
    skipped: Tensor  # calls without effect so far, 0-d int64


Skippable = TypeVar("Skippable", Transform, Pipeline)


@factory
def skip_if_nonfinite(part: Skippable) -> Skippable:
    """Skips calls whose gradients contain a NaN or an infinity.

    - Around a pipeline: the result of its hook is tested, and parameters and state do not change. Use this form for
      training. `after` still runs, with weight 0: its periods advance, and an average that is due is taken.
    - Around a transform: the gradients become 0 and its state does not change. An optimizer after it still steps, so
      its momentum moves the parameters.

    Gradients accumulated by `accumulate` inside are lost with the call. All ranks skip the same calls only if the
    tested gradients are equal on all of them: put the reduction inside.

    Args:
        part: A `Pipeline` or a `Transform`.

    Returns:
        A `Pipeline` or a `Transform`, like `part`, with state `SkipState(inner, skipped)`.

    Raises:
        TypeError: `part` is neither.
        ValueError: `part` is a pipeline that skips such steps already.

    Same as: optax.apply_if_finite; the skipped step of torch.amp.GradScaler.

    >>> from fjoin import transforms as tx
    >>> safe = tx.skip_if_nonfinite(tx.fuse(tx.identity(), tx.sgd(1.0)))
    >>> p = torch.tensor(1.0)
    >>> safe.step(p, torch.tensor(float("nan")), safe.init(p))[0]
    tensor(1.)
    """
    if isinstance(part, Pipeline):
        return _guarded(part, Skips(lambda inner: SkipState(inner, _no_calls()), _count))  # type: ignore[return-value]
    if isinstance(part, Optimizer):
        raise TypeError("skip_if_nonfinite takes a pipeline or a transform; wrap fuse(hook, optimizer)")
    check_transform(part, "skip_if_nonfinite: part")

    def init(params: Tree) -> State:
        return SkipState(part.init(params), _no_calls())

    def update(grads: Tree, state: SkipState, params: Tree, call: Call) -> tuple[Tree, State]:
        out, inner = part.run(grads, own_state(state, SkipState).inner, params, call)
        if out is None:
            return None, trees.with_changes(state, inner=inner)
        fine = trees.all_finite(out)
        kept = trees.choose_state(fine, inner, state.inner)
        return trees.where(fine, out, trees.zeros_like(out)), SkipState(kept, state.skipped + ~fine)

    return Transform(init, update, facts=Facts(takes=("donated",), wraps="parts"))


def _no_calls() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _count(state: SkipState, fine: Tensor) -> SkipState:
    return trees.with_changes(state, skipped=state.skipped + ~fine)


def _guarded(part: Pipeline, skips: Skips) -> Pipeline:
    """A pipeline that runs another one and skips its steps with non-finite gradients after the hook."""
    if part.skips is not None:
        remedy = "wrap a pipeline in one of skip_if_nonfinite and dynamic_loss_scale"
        raise ValueError(f"{part!r} leaves out steps already; {remedy}")
    codec = part.sharding.codec if part.sharding else None
    return pipeline_of(part.hook, part.optimizer, part.after, part.on_state, codec, skips)


class LossScaleState(NamedTuple):
    inner: State
    scale: Tensor  # the factor of the next loss, 0-d float32
    streak: Tensor  # steps with effect since the scale has last changed, 0-d int64
    skipped: Tensor  # steps without effect so far, 0-d int64


@factory
def dynamic_loss_scale(
    pipeline: Pipeline,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: Count = 2000,
) -> Pipeline:
    """Steps with the gradients of a scaled loss, and finds the largest scale that does not overflow.

        g <- g / scale, for the pipeline's step, which is skipped if a NaN or an infinity results
        scale <- scale * growth_factor   after growth_interval steps with effect in a row
        scale <- scale * backoff_factor  after a step without effect

    `fjoin.train_step` scales the loss itself, and reports unscaled losses; after `fjoin.ddp.register` write
    `handle.scale(loss).backward()`. In your own loop multiply the loss by `state.scale`. Put the reduction inside: an
    overflow on one rank then reaches all ranks, and all skip the same steps and have the same scale.

    Gradients that overflow are passed as NaN. Otherwise a stage such as clipping could make them finite again.

    Args:
        pipeline: The pipeline that steps with the gradients; parameters of float32, bfloat16 or float64. The loss may
            cast them to float16, by itself or under torch.autocast.
        init_scale: The first scale, above 0.
        growth_factor: Above 1. A scale that would become infinite does not change.
        backoff_factor: Between 0 and 1.
        growth_interval: Steps in a row, at least 1.

    Returns:
        A `Pipeline` with state `LossScaleState(inner, scale, streak, skipped)`.

    Raises:
        TypeError: `pipeline` is no pipeline; at `init`: float16 parameters, whose unscaled gradients would underflow.
        ValueError: a number out of its range; a pipeline that skips steps itself.

    Same as: torch.amp.GradScaler.
    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2.

    >>> from fjoin import transforms as tx
    >>> scaled = dynamic_loss_scale(tx.fuse(tx.mean("data"), tx.sgd(1.0)), init_scale=4.0, growth_interval=1)
    >>> def one_rank(grad):
    ...     state = scaled.init({"p": torch.tensor(1.0)})
    ...     params, state = scaled.step({"p": torch.tensor(1.0)}, {"p": grad}, state)
    ...     return params["p"].item(), state.scale.item()
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor(4.0), torch.tensor(0.0)])
    [(0.5, 8.0), (0.5, 8.0)]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor(float("inf")), torch.tensor(0.0)])
    [(1.0, 2.0), (1.0, 2.0)]
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"dynamic_loss_scale takes a Pipeline, got {pipeline!r}; write fuse(hook, optimizer)")
    if not (isinstance(init_scale, numbers.Real) and 2.0**-126 <= init_scale <= 2.0**127):
        raise ValueError(f"init_scale must be a number above 0 that float32 holds, got {init_scale!r}")
    if not (isinstance(growth_factor, numbers.Real) and growth_factor > 1 and math.isfinite(growth_factor)):
        raise ValueError(f"growth_factor must be a finite number above 1, got {growth_factor!r}")
    if not (isinstance(backoff_factor, numbers.Real) and 0 < backoff_factor < 1):
        raise ValueError(f"backoff_factor must be a number between 0 and 1, got {backoff_factor!r}")

    def begin(inner: State) -> LossScaleState:
        return LossScaleState(inner, torch.tensor(init_scale, dtype=torch.float32), _no_calls(), _no_calls())

    def update_counters(state: LossScaleState, fine: Tensor) -> LossScaleState:
        before = state.scale, state.streak + 1, state.skipped
        scale, streak, skipped = (trees.to_device(fine.device, t) for t in before)
        due = streak == growth_interval
        grown, shrunk = ((scale.double() * factor).float() for factor in (growth_factor, backoff_factor))
        kept = torch.where(due & torch.isfinite(grown), grown, scale)
        streak = torch.where(fine & ~due, streak, torch.zeros_like(streak))
        return LossScaleState(state.inner, torch.where(fine, kept, shrunk), streak, skipped + ~fine)

    return _guarded(pipeline, Skips(begin, update_counters, scaled=True))
