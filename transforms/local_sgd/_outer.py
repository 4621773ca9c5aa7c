"""An optimizer on the change of the parameters over many steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._check import is_finite, is_number, whole_number
from ..pipelines._rates import rates_of
from ..spec._spec import factory
from ..step_param._optimizer import Optimizer
from ..transform._call import Call
from ..transform._counter import check_state, counts_steps
from ..transform._timing import Period, Periodic
from ..transform._transform import Needs, Transform, check_transform
from ..transform._weights import Over, check_weight
from ..tree._choose import choose_state
from ..tree._placement import Averaged, Summed
from ..tree._tree import State, Tree, map_with_path, named_leaves, where, with_changes
from ._window import WindowMean, at_least_f32, check_reduces, like, no_weight


class OuterState(NamedTuple):
    step: int  # calls so far, on the host
    anchor: dict[str, Tensor]  # path -> the parameters after the last outer step, at least float32, equal on all ranks
    hook: State
    optimizer: dict[str, State]  # path -> state, equal on all ranks
    weight: Summed[Tensor]  # the sum of the weights since the last message, 0-d float64
    pending: Averaged[dict[str, Tensor]]  # path -> this rank's change that waits for its use; empty without a delay
    pending_weight: Summed[Tensor]  # its weight, 0-d float64


@factory
def outer_step(
    hook: Transform,
    optimizer: Optimizer,
    steps: int = 1,
    first: int | None = None,
    delay: int = 0,
    mix: float = 0.0,
    over: Over = "weight",
) -> Transform:
    """Steps the parameters by an outer optimizer on their mean change over the ranks, once in `steps` calls.

        d_r    <- anchor - p_r,  d <- mean of d_r over the ranks, by `hook`
        anchor <- outer optimizer on (anchor, d)
        p_r    <- mix p_r + (1 - mix) anchor

    The weight of a rank is that of its calls since the last message. With a delay the mean of the changes up to one call is
    sent and used `delay` calls later; the training between counts for the next message. Where no rank had
    input, parameters, anchor and outer state stay as they are.

    For parameters in 16 bits without master copies and mix=0, the change is that from the anchor rounded to their dtype, so
    that the float32 anchor gathers changes of less than one of their steps.

    Args:
        hook: The reduction of the changes: `mean`, `quantized_mean`, `error_feedback` of an encoded mean, and so on.
        optimizer: The outer optimizer; sgd(1.0) makes the anchor the mean of the parameters.
        steps: The period. Changes are taken in the calls first, first + steps, ... (counted from 0).
        first: The first of these calls; by default steps - 1.
        delay: Calls between a change and the message that averages it, fewer than `steps`.
        mix: The share of a rank's own parameters that remains, from 0 to below 1. With 0 the parameters are equal on
            all ranks after each outer step.
        over: The weights of the ranks; see `average_parameters`.

    Returns:
        A `Transform` of parameters, for `fuse(..., after=...)`.
        State: `OuterState(step, anchor, hook, optimizer, weight, pending, pending_weight)`; the last three differ between
        ranks.

    Raises:
        TypeError: `hook` is no reduction; `optimizer` is no optimizer.
        ValueError: a number out of range.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105, algorithm 1; delay and mix: Streaming DiLoCo, arXiv:2501.18512.

    >>> from fjoin import transforms as tx
    >>> def one_rank(change):
    ...     outer, anchor = tx.outer_step(tx.mean("data"), tx.sgd(0.5)), torch.tensor(1.0)
    ...     return outer.update(anchor - change, outer.init(anchor))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [0.2, 0.6])
    [tensor(0.8000), tensor(0.8000)]
    """
    check_reduces("outer_step", check_transform(hook, "outer_step: hook"))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"outer_step: optimizer must be an Optimizer such as sgd(0.7), got {optimizer!r}")
    whole_number("outer_step: steps", steps, 1)
    period = Period(steps, steps - 1 if first is None else whole_number("outer_step: first", first, 0))
    whole_number("outer_step: delay", delay, 0)
    if delay >= steps:
        raise ValueError(
            f"outer_step: delay must be below steps={steps}, got {delay}; the next message would begin before"
        )
    if not (is_number(mix) and is_finite(mix) and 0 <= mix < 1):
        raise ValueError(f"outer_step: mix must be a number from 0 to below 1, got {mix!r}")
    reduce = WindowMean(hook, over)

    def init(params: Tree) -> OuterState:
        anchor = {path: leaf.detach().clone() for path, leaf in at_least_f32(named_leaves(params)).items()}
        return OuterState(
            0, anchor, hook.init(anchor), optimizer.init(anchor), no_weight(), nothing(anchor), no_weight()
        )

    def nothing(anchor: dict[str, Tensor]) -> dict[str, Tensor]:
        return {path: torch.zeros_like(leaf) for path, leaf in anchor.items()} if delay else {}

    def change(values: dict[str, Tensor], state: OuterState) -> OuterState:
        """The state with this rank's change, and a new window."""
        # Parameters that were set to the anchor have its value in their own dtype; the rounding is no change of theirs.
        seen = state.anchor if mix else like(state.anchor, values)
        own = {path: seen[path].to(state.anchor[path].dtype) - value for path, value in values.items()}
        return with_changes(state, pending=own, pending_weight=state.weight, weight=torch.zeros_like(state.weight))

    def use(values: dict[str, Tensor], state: OuterState, call: Call) -> tuple[dict[str, Tensor], OuterState]:
        rates = rates_of(optimizer, state.anchor, state.optimizer)
        mean, inner, live = reduce(state.pending, state, call, rates, state.pending_weight)
        new = optimizer.step(state.anchor, mean, state.optimizer)
        anchor, outer = choose_state(live, new, (state.anchor, state.optimizer))
        mixed = anchor
        if mix:
            mixed = {path: torch.lerp(anchor[path], p.to(anchor[path].dtype), mix) for path, p in values.items()}
        state = with_changes(
            state, anchor=anchor, hook=inner, optimizer=outer, pending=nothing(anchor), pending_weight=no_weight()
        )
        return where(live, like(mixed, values), values), state

    @counts_steps
    def update(values: Tree, state: OuterState, params: Tree, call: Call) -> tuple[Tree, OuterState]:
        del params
        check_state(state, OuterState)
        number, named = state.step, named_leaves(values)
        state = with_changes(state, step=number + (not call.flush), weight=state.weight + check_weight(call.weight))

        def used(at: int) -> tuple[dict[str, Tensor], OuterState]:
            return use(named, state, call.inside(step=period.window(at)))

        if call.flush:
            waiting = [past for past in range(max(number - delay, 0), number) if period.due(past)]
            if waiting:
                named, state = used(waiting[0])
            if period.open(number):
                state = change(named, state)
                named, state = used(number + period.steps)
            return map_with_path(lambda path, _: named[path], values), state
        if period.due(number):
            state = change(named, state)
        if not period.due(number - delay):
            return values, state
        named, state = used(number - delay)
        return map_with_path(lambda path, _: named[path], values), state

    return Transform(init, update, Needs.NOTHING, takes=("flush",), timing=Periodic(period, hook, delay, alone=False))
