"""Transforms that decide when others run.

The decision whether a collective runs depends on a host integer in the state, which is equal on all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .. import base
from ..base import Call, Count, Facts, Index, Needs, Period, State, Transform, Tree, factory, shares, timings, trees


class SwitchState(NamedTuple):
    step: int  # calls so far, on the host
    before: State
    after: State


@factory
def switch_after(step: Index, before: Transform, after: Transform) -> Transform:
    """Runs one transform for the first `step` calls, and another one afterwards.

    Args:
        step: The number of calls of `before`; at least 0.
        before: The transform for calls 0 to step - 1.
        after: The transform for the later calls. Its state starts as `after.init(params)`; for parameters, after an
            optimizer, of the parameters at the switch. There `before` is flushed, so that an open window of it is not
            lost.

    Returns:
        A `Transform` with state `SwitchState(step, before, after)`.

    Raises:
        ValueError: `step` is no whole number, or negative.
        TypeError: `before` or `after` is no transform.

    >>> from fjoin import transforms as tx
    >>> late = tx.switch_after(1, tx.identity(), tx.stateless(torch.neg))
    >>> state = late.init(torch.tensor(0.0))
    >>> first, state = late.update(torch.tensor(1.0), state)
    >>> first, late.update(torch.tensor(1.0), state)[0]
    (tensor(1.), tensor(-1.))
    """

    def init(params: Tree) -> State:
        return SwitchState(0, before.init(params), after.init(params))

    phases = {"before": before, "after": after}
    timing: Any = timings.of_switch(step, before, after)

    def update(grads: Tree, state: SwitchState, params: Tree, call: Call) -> tuple[Tree, State]:
        state = base.own_state(state, SwitchState, call)
        name = "before" if state.step < step else "after"
        for _, own, flush in timing.flushes(state.step) if call.flush else timing.runs(state.step, call.persistent):
            at_switch = {"weight": 0.0, "flush": True} if flush and not call.flush else {}
            grads, new = phases[name].run(grads, getattr(state, name), params, call.inside(step=own, **at_switch))
            state = trees.with_changes(state, **{name: new})
            if at_switch:
                state = trees.with_changes(state, after=after.init(grads))
        return grads, trees.with_changes(state, step=state.step + (not call.flush))

    return Transform(init, update, Needs.NOTHING, timing=timing, facts=Facts(takes=("donated",), wraps="parts"))


class EveryState(NamedTuple):
    step: int  # calls so far, on the host
    inner: State
    weight: base.Summed[Tensor]  # for parameters: the sum of the weights of the calls since the last run, 0-d float64


@factory
def every(
    steps: Count, transform: Transform, first: Index | None = None, except_every: Count | None = None
) -> Transform:
    """Runs a transform in every `steps`-th call; in the other calls the gradients pass unchanged.

    For parameters, after an optimizer, the transform gets the sum of the weights of all calls since its last run: the
    weight of the batches on which a rank has trained its parameters since then.

    Args:
        steps: The period.
        transform: The transform, which runs in the calls first, first + steps, first + 2 steps, ... (counted from 0).
        first: The first call that runs it; by default steps - 1.
        except_every: Of these calls, those whose number is a multiple of this do not run it: another transform, with
            this period, replaces it there.

    Returns:
        A `Transform` with state `EveryState(step, inner, weight)`.

    Raises:
        ValueError: `steps` or `except_every` is no whole number from 1, or `first` none from 0.
        TypeError: `transform` is not a Transform.

    >>> from fjoin import transforms as tx
    >>> second = tx.every(2, tx.stateless(torch.neg))
    >>> state = second.init(torch.tensor(0.0))
    >>> first, state = second.update(torch.tensor(1.0), state)
    >>> first, second.update(torch.tensor(1.0), state)[0]
    (tensor(1.), tensor(-1.))
    """
    period = Period(steps, steps - 1 if first is None else first, except_every)
    timing: Any = timings.of_period(period, transform)

    def init(params: Tree) -> State:
        return EveryState(0, transform.init(params), shares.no_weight())

    def update(grads: Tree, state: EveryState, params: Tree, call: Call) -> tuple[Tree, State]:
        state = base.own_state(state, EveryState, call)
        number, persistent = state.step, call.persistent
        window = state.weight + shares.check_weight(call.weight) if persistent else state.weight
        none = torch.zeros_like(window)

        if not call.flush:
            state = trees.with_changes(state, step=number + 1, weight=none if period.ends(number) else window)
        for _, own, flush in timing.flushes(number) if call.flush else timing.runs(number, persistent):
            weight = {"weight": none if flush else window} if flush or persistent else {}
            grads, new = transform.run(grads, state.inner, params, call.inside(step=own, flush=flush, **weight))
            state = EveryState(state.step, new, none)
        return grads, state

    return Transform(init, update, Needs.NOTHING, timing=timing, facts=Facts(takes=("flush",)))


class AccumulateState(NamedTuple):
    step: int  # calls so far, on the host
    weight: base.Summed[Tensor]  # the sum of the weights in this window so far, 0-d float64
    grads: base.Summed[Tree]  # sum of weight * gradient in this window, like the parameters; of 16-bit ones in float32
    inner: State

    def choose(self, fine: Tensor, old: AccumulateState) -> AccumulateState:
        """This state with `inner` chosen; after a call without effect the accumulated gradients are lost too."""
        return trees.with_changes(self, inner=trees.choose_state(fine, self.inner, old.inner))

    def before_the_end(self, inner: State) -> AccumulateState:
        """The state before the last call of a window, whatever its length."""
        return trees.with_changes(self, step=-1, inner=inner)


@factory
def accumulate(steps: Count, transform: Transform) -> Transform:
    """Accumulates the gradients of `steps` calls and passes their weighted mean to a transform once.

    In the other calls the gradients are None: chain and fuse stop there, and nothing is sent or stepped. The window's
    weight is the sum of its calls' weights, so the mean over all calls and ranks stays exact.

    Args:
        steps: Calls in a window.
        transform: The transform that runs at the end of each window, for example `mean("data")`.

    Returns:
        A `Transform` with state `AccumulateState(step, weight, grads, inner)`.

    Raises:
        ValueError: `steps` is no whole number, or below 1.
        TypeError: `transform` is not a Transform.

    Same as: optax.MultiSteps.

    >>> from fjoin import transforms as tx
    >>> hook = tx.accumulate(2, tx.identity())
    >>> state = hook.init(torch.tensor(0.0))
    >>> first, state = hook.update(torch.tensor(1.0), state, weight=1)
    >>> first, hook.update(torch.tensor(4.0), state, weight=2)[0]
    (None, tensor(3.))
    """

    def fresh(params: Tree, step: int, inner: State) -> AccumulateState:
        zeros = optree.tree_map(lambda p: torch.zeros_like(p, dtype=base.devices.wide_dtype(p.dtype)), params)
        return AccumulateState(step, shares.no_weight(), zeros, inner)

    def init(params: Tree) -> State:
        return fresh(params, 0, transform.init(params))

    def update(grads: Tree, state: AccumulateState, params: Tree, call: Call) -> tuple[Tree, State]:
        base.own_state(state, AccumulateState)
        w = trees.to_device(trees.device_of(optree.tree_leaves(grads)), shares.check_weight(call.weight))
        gathered = optree.tree_map(
            lambda a, g: torch.where(w > 0, a + base.devices.widened(g) * w.to(a.dtype), a), state.grads, grads
        )
        total, count = state.weight + w, state.step + 1
        if count % steps:
            return None, AccumulateState(count, total, gathered, state.inner)
        divisor = torch.where(total > 0, total, torch.ones_like(total))
        mean = optree.tree_map(lambda a, g: (a / divisor.to(a.dtype)).to(g.dtype), gathered, grads)
        out, new = transform.run(mean, state.inner, params, call.inside(weight=total))
        return out, fresh(grads, count, new)

    return Transform(init, update, Needs.NOTHING, timing=base.Timing(), facts=Facts(pauses=True, wraps="whole"))
