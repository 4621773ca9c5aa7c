"""A gradient transform, an optimizer and a parameter transform as one step."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ._base import Optimizer, Pipeline, Transform, check_transform
from ._spec import factory
from ._tree import State, Tree, all_finite, check_same, choose_state, on, where
from .sync._weights import check_weight


class PipelineState(NamedTuple):
    hook: State
    optimizer: State  # the tree of the parameters with an optimizer state at every leaf
    after: State


@factory
def fuse(hook: Transform, optimizer: Optimizer, after: Transform | None = None) -> Pipeline:
    """One training step as a pure function: gradient transform, optimizer, parameter transform.

    The shell runs the same pipeline bucket by bucket while the backward pass goes on, with the same
    result.

    Args:
        hook: What happens to the gradients; `chain(...)` for several things, `identity()` for nothing.
        optimizer: What turns gradients into new parameters.
        after: What happens to the new parameters; it gets them in the place of gradients. A reduction in it gives back
            what it is given where no rank has weight.

    Returns:
        A `Pipeline`: `init(params) -> state` and
        `step(params, grads, state, *, weight=None, lane=None) -> (params, state)`.
        State: `PipelineState(hook, optimizer, after)`.

    Raises:
        TypeError: an argument of the wrong kind; at `step`: a leaf of another dtype.
        ValueError: at `step`: gradients or state that do not fit the parameters.

    Same as: torch's _hook_then_optimizer, for any hook and optimizer.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.fuse(tx.clip_by_value(1.0), tx.sgd(0.5))
    >>> params = {"w": torch.tensor([1.0])}
    >>> pipeline.step(params, {"w": torch.tensor([9.0])}, pipeline.init(params))[0]
    {'w': tensor([0.5000])}
    """
    check_transform(hook, "fuse: hook")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"fuse: optimizer must be an Optimizer, got {optimizer!r}; write fuse(hook, optimizer), for example "
            f"fuse(mean('data'), sgd(0.1))"
        )
    if after is not None:
        check_transform(after, "fuse: after")

    def init(params: Tree) -> State:
        return PipelineState(hook.init(params), optimizer.init(params), after.init(params) if after else ())

    def step(params: Tree, grads: Tree, state: PipelineState, **extra: Any) -> tuple[Tree, State]:
        params, state, _ = run(hook, optimizer, after, params, grads, state, False, **extra)
        return params, state

    return Pipeline(init, step, hook, optimizer, after)


def run(
    hook: Transform, optimizer: Optimizer, after: Transform | None, params: Tree, grads: Tree, state: PipelineState,
    skips: bool, *, weight: Any = None, lane: Any = None, **extra: Any,
) -> tuple[Tree, PipelineState, Tensor | None]:  # fmt: skip
    """One step: parameters, state, and with `skips` whether it has had an effect, None within a window of `accumulate`.

    Args:
        skips: Whether a step whose gradients are not finite behind the hook is left out: parameters and state stay as they
            were, and `after` runs as in any other step, with weight 0.
    """
    if not isinstance(state, PipelineState):
        raise ValueError(
            f"state is a {type(state).__name__}, expected the PipelineState that this pipeline's init or step returned"
        )
    check_same("grads", grads, "params", params)
    grads, hook_state = hook.update(grads, state.hook, params, weight=weight, lane=lane, **extra)
    if grads is None:  # accumulating: nothing to step with in this call
        return params, state._replace(hook=hook_state), None
    new, optimizer_state = optimizer.step(params, grads, state.optimizer)
    fine = None
    if skips:
        fine = all_finite(grads)  # and not the parameters: some optimizers take the sign of a NaN for 0
        new = where(fine, new, params)
        hook_state = choose_state(fine, hook_state, state.hook)
        optimizer_state = choose_state(fine, optimizer_state, state.optimizer)
        weight = on(fine.device, check_weight(weight)) * fine
    after_state = state.after
    if after:
        new, after_state = after.update(new, state.after, new, weight=weight, keep_idle=True, **extra)
    return new, PipelineState(hook_state, optimizer_state, after_state), fine
