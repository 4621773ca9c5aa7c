"""An outer optimizer on the mean change of the parameters, and DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import base
from ..base import Call, Count, Facts, Index, Needs, Period, State, Transform, Tree, factory, shares, timings, trees
from ..combinators import Patterns, check_which, identity, in_fragments, partition
from ..optimizers import Optimizer, sgd
from ..pipelines import Pipeline, fuse, rates_of
from ._average import StatePolicy, WindowMean, at_least_f32, like, on_state_of


class OuterState(NamedTuple):
    step: int  # calls so far, on the host
    anchor: dict[str, Tensor]  # path -> the parameters after the last outer step, at least float32, equal on all ranks
    hook: State
    optimizer: dict[str, State]  # path -> state, equal on all ranks
    weight: base.Summed[Tensor]  # the sum of the weights since the last message, 0-d float64
    pending: base.Averaged[dict[str, Tensor]]  # path -> this rank's change, not used yet; empty without a delay
    pending_weight: base.Summed[Tensor]  # its weight, 0-d float64


@factory
def outer_step(
    reduction: Transform,
    optimizer: Optimizer,
    every: Count = 1,
    first: Index | None = None,
    delay: Index = 0,
    mix: float = 0.0,
) -> Transform:
    """Steps the parameters by an outer optimizer on their mean change over the ranks, once in `every` calls.

        d_r    <- anchor - p_r,  d <- mean of d_r over the ranks, by `reduction`
        anchor <- outer optimizer on (anchor, d)
        p_r    <- mix p_r + (1 - mix) anchor

    The weight of a rank is that of its calls since the last message. With a delay the mean of the changes up to one
    call is sent and used `delay` calls later; the training between counts for the next message. Where no rank had
    input, parameters, anchor and outer state stay as they are.

    For parameters in 16 bits without master copies and mix=0, the change is that from the anchor rounded to their
    dtype, so that the float32 anchor gathers changes of less than one of their steps.

    Args:
        reduction: That of the changes: `mean`, `compress`, `error_feedback` of an encoded mean, and so on; its `over`
            weighs the ranks, as that of `average_parameters`.
        optimizer: The outer optimizer; sgd(1.0) makes the anchor the mean of the parameters.
        every: The period. Changes are taken in the calls first, first + every, ... (counted from 0).
        first: The first of these calls; by default every - 1.
        delay: Calls between a change and the message that averages it, fewer than `every`.
        mix: The share of a rank's own parameters that remains, from 0 to below 1. With 0 the parameters are equal on
            all ranks after each outer step.

    Returns:
        A `Transform` of parameters, for `fuse(..., after=...)`.
        State: `OuterState(step, anchor, hook, optimizer, weight, pending, pending_weight)`; the last three differ
        between ranks.

    Raises:
        TypeError: `reduction` is none; `optimizer` is no optimizer.
        ValueError: a number out of range.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105, algorithm 1; delay and mix: Streaming DiLoCo, arXiv:2501.18512.

    >>> from fjoin import transforms as tx
    >>> def one_rank(change):
    ...     outer, anchor = tx.outer_step(tx.mean("data"), tx.sgd(0.5)), torch.tensor(1.0)
    ...     return outer.update(anchor - change, outer.init(anchor))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [0.2, 0.6])
    [tensor(0.8000), tensor(0.8000)]
    """
    reduce = WindowMean("outer_step", reduction)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"outer_step: optimizer must be an Optimizer such as sgd(0.7), got {optimizer!r}")
    period = Period(every, every - 1 if first is None else first)
    if delay >= every:
        raise ValueError(f"outer_step: delay must be below every={every}, got {delay}: the next message begins then")
    if not (base.checks.is_number(mix) and 0 <= mix < 1):
        raise ValueError(f"outer_step: mix must be a number from 0 to below 1, got {mix!r}")

    def init(params: Tree) -> OuterState:
        anchor = {path: leaf.detach().clone() for path, leaf in at_least_f32(trees.named_leaves(params)).items()}
        inner, outer = reduction.init(anchor), optimizer.init(anchor)
        return OuterState(0, anchor, inner, outer, shares.no_weight(), nothing(anchor), shares.no_weight())

    def nothing(anchor: dict[str, Tensor]) -> dict[str, Tensor]:
        return {path: torch.zeros_like(leaf) for path, leaf in anchor.items()} if delay else {}

    def change(values: dict[str, Tensor], state: OuterState) -> OuterState:
        """The state with this rank's change, and a new window."""
        # Parameters that were set to the anchor have its value in their own dtype; the rounding is no change of theirs.
        seen = state.anchor if mix else like(state.anchor, values)
        own = {path: seen[path].to(state.anchor[path].dtype) - value for path, value in values.items()}
        return trees.with_changes(
            state, pending=own, pending_weight=state.weight, weight=torch.zeros_like(state.weight)
        )

    def use(values: dict[str, Tensor], state: OuterState, call: Call) -> tuple[dict[str, Tensor], OuterState]:
        rates = rates_of(optimizer, state.anchor, state.optimizer)
        mean, inner, live = reduce(state.pending, state.hook, call, rates, state.pending_weight)
        new = optimizer.step(state.anchor, mean, state.optimizer)
        anchor, outer = trees.choose_state(live, new, (state.anchor, state.optimizer))
        mixed = anchor
        if mix:
            mixed = {path: torch.lerp(anchor[path], p.to(anchor[path].dtype), mix) for path, p in values.items()}
        empty = dict(pending=nothing(anchor), pending_weight=shares.no_weight())
        state = trees.with_changes(state, anchor=anchor, hook=inner, optimizer=outer, **empty)
        return trees.where(live, like(mixed, values), values), state

    def update(values: Tree, state: OuterState, params: Tree, call: Call) -> tuple[Tree, OuterState]:
        state = base.own_state(state, OuterState, call)
        number, named = state.step, trees.named_leaves(values)
        state = trees.with_changes(
            state, step=number + (not call.flush), weight=state.weight + shares.check_weight(call.weight)
        )

        def used(window: int) -> tuple[dict[str, Tensor], OuterState]:
            return use(named, state, call.inside(step=window))

        if call.flush:
            waiting = [past for past in range(max(number - delay, 0), number) if period.due(past)]
            if waiting:
                named, state = used(period.window(waiting[0]))
            if period.open(number):
                state = change(named, state)
                named, state = used(period.ended(number))
            return trees.map_with_path(lambda path, _: named[path], values), state
        if period.due(number):
            state = change(named, state)
        if not period.due(number - delay):
            return values, state
        named, state = used(period.window(number - delay))
        return trees.map_with_path(lambda path, _: named[path], values), state

    timing = timings.of_period(period, reduction, delay)
    return Transform(init, update, Needs.NOTHING, timing=timing, facts=Facts(takes=("flush",)))


@factory
def diloco(
    inner: Optimizer,
    reduction: Transform,
    every: Count,
    outer: Optimizer | None = None,
    *,
    fragments: int | Sequence[Patterns] = 1,
    delay: Index = 0,
    mix: float = 0.0,
    state: StatePolicy = "keep",
    hook: Transform | None = None,
) -> Pipeline:
    """Each rank trains alone; once in `every` steps an outer optimizer steps on the mean change of the parameters.

    With several fragments, the parameters are split into groups whose messages begin at different steps, spread evenly
    over the period. With a delay, a change is averaged and used `delay` steps later.

    Args:
        inner: The optimizer of each rank.
        reduction: That of the changes: `mean("data")`, or fewer bytes by `error_feedback(compress(int8(),
            mean("data")))`.
        every: The period in steps.
        outer: The outer optimizer; None: sgd(0.7, momentum=0.9, nesterov=True).
        fragments: The number of groups of parameters, at most `every`; or glob patterns for paths, one for each group,
            which together match all parameters.
        delay: Steps between a change and the message that averages it, below `every`.
        mix: The share of a rank's own parameters that remains when a message is used; see `outer_step`.
        state, hook: As for `local_sgd`.

    Returns:
        A `Pipeline`: `fuse(identity(), inner, after=outer_step(reduction, outer, every))`, and so on.

    Raises:
        ValueError: more fragments than steps in a period, or two with one pattern; an argument out of range.
            At `init`: more fragments than parameters.
        TypeError: an argument of the wrong kind.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; fragments, delay and mix: Streaming DiLoCo, arXiv:2501.18512.
        With outer=sgd(lr, momentum=m) it is SlowMo: Wang et al., arXiv:1910.00643, algorithm 1, for an inner learning
        rate that does not change.

    >>> from fjoin import transforms as tx
    >>> tx.diloco(tx.adamw(1e-3), tx.mean("data"), every=50).after
    outer_step(mean('data'), sgd(lr=0.7, momentum=0.9, nesterov=True), every=50)
    """
    outer = sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    patterns = None if isinstance(fragments, int) else _patterns(fragments)
    count = base.checks.whole_number("diloco: fragments", fragments if patterns is None else len(patterns), 1)
    if count > every:
        raise ValueError(f"diloco: {count} fragments need a period of as many steps, got every={every}")
    parts = [outer_step(reduction, outer, every, (i + 1) * every // count - 1, delay, mix) for i in range(count)]
    if patterns is not None:
        after = partition(dict(zip(patterns, parts, strict=True)))
    elif count > 1:
        after = in_fragments(*parts)
    else:
        after = outer_step(reduction, outer, every, None, delay, mix)
    on_state = on_state_of("diloco", state, reduction, every, None)
    return fuse(identity() if hook is None else hook, inner, after, on_state)


def _patterns(fragments: Sequence[Patterns]) -> list[Patterns]:
    if not isinstance(fragments, (list, tuple)):
        one = f"; for one group write [{fragments!r}]" if isinstance(fragments, str) else ""
        raise TypeError(
            f"diloco: fragments must be a whole number, or a list of glob patterns for paths, got {fragments!r}{one}"
        )
    for pattern in fragments:
        check_which("diloco: a fragment", pattern, functions=False)
    found = [tuple(pattern) if isinstance(pattern, list) else pattern for pattern in fragments]
    if twice := [pattern for pattern in dict.fromkeys(found) if found.count(pattern) > 1]:
        raise ValueError(f"diloco: fragments has {twice} more than once; the first match of a path wins")
    return found
