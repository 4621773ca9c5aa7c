"""Calls without effect: all ranks skip the same steps with non-finite gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..spec._spec import factory
from ..step_param._optimizer import Optimizer
from ..transform._call import Call
from ..transform._inner import Inner
from ..transform._transform import Reduction, Transform, check_transform
from ..tree._choose import choose_state
from ..tree._tree import State, Tree, all_finite, where, with_changes, zeros_like
from ._fuse import pipeline_of
from ._pipeline import Pipeline, Skips


class SkipState(NamedTuple):
    inner: State
    skipped: Tensor  # calls without effect so far, 0-d int64
    sums: Any = ()  # the sums of a reduction inside in the last call, with effect or not


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
        A `Pipeline` or a `Transform`, like `part`, with state `SkipState(inner, skipped, sums)`.

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
        return guarded(part, Skips(lambda inner: SkipState(inner, no_calls()), _count))
    if isinstance(part, Optimizer):
        raise TypeError(
            "skip_if_nonfinite takes a pipeline or a transform; write skip_if_nonfinite(fuse(hook, optimizer))"
        )
    return _skip_transform(check_transform(part, "skip_if_nonfinite: part"))


def no_calls() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _count(state: SkipState, fine: Tensor) -> SkipState:
    return with_changes(state, skipped=state.skipped + ~fine)


def _skip_transform(part: Transform) -> Transform:
    inside = Inner(part)

    def sums_of(inner: State) -> Any:
        return part.sums(inner) if part.sums else ()

    def init(params: Tree) -> State:
        inner = part.init(params)
        return SkipState(inner, no_calls(), sums_of(inner))

    def update(grads: Tree, state: SkipState, params: Tree, call: Call) -> tuple[Tree, State]:
        out, inner = inside.run(grads, state, params, call)
        if out is None:
            return None, with_changes(state, inner=inner, sums=sums_of(inner))
        fine = all_finite(out)
        kept = choose_state(fine, inner, state.inner)
        return where(fine, out, zeros_like(out)), SkipState(kept, state.skipped + ~fine, sums_of(inner))

    reduces = Reduction(lambda state: state.sums) if part.reduces else None
    return Transform(init, update, reduces=reduces, takes=("donated",))


def guarded(part: Pipeline, skips: Skips) -> Pipeline:
    """A pipeline that runs another one and skips its steps with non-finite gradients after the hook."""
    if part.skips is not None:
        raise ValueError(
            f"{part!r} leaves out steps that are not finite already; wrap a pipeline in one of skip_if_nonfinite and "
            f"dynamic_loss_scale"
        )

    codec = part.sharding.codec if part.sharding else None
    return pipeline_of(part.hook, part.optimizer, part.after, part.on_state, codec, skips)
