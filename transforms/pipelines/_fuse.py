"""A gradient transform, an optimizer and a parameter transform as one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._axis_env import bound, under_vmap
from .._call import Call, call_of
from .._check import flag as check_flag
from .._lane import Lane, check_lane
from .._placement import PerRank
from .._spec import factory
from .._transform import Transform, check_transform
from .._tree import (
    State,
    Tree,
    all_finite,
    check_dense,
    check_same,
    map_with_path,
    named_leaves,
    path_string,
    plain,
    readable_without_sync,
    to_device,
)
from .._weights import check_weight
from ..axes._collectives import psum
from ..codecs._codec import Codec
from ..layout._pieces import Pieces, bind_pieces
from ..optimizers._mixed_precision import masters_of, with_masters
from ..plan._plan import Plan, make_plan
from ..step_param._lift import matched
from ..step_param._lift import step as step_tree
from ..step_param._optimizer import Optimizer
from ..step_param._state_fields import state_fields, with_state_fields
from . import _rates as rates_check
from ._donation import are_apart, in_own_memory, use
from ._effect import FLUSH, Effect, flag
from ._pipeline import Pipeline, Skips
from ._sharding import sharding_of


class PipelineState(NamedTuple):
    hook: State
    optimizer: State  # the tree of the parameters with an optimizer state at every leaf
    after: State
    on_state: State
    step: int  # steps so far, skipped ones included, on the host; periods count by it
    window: PerRank[Tensor]  # this rank's weights in the calls of `accumulate` since the last step, 0-d float64
    gather: State = ()  # of a sharded pipeline


@factory
def fuse(
    hook: Transform, optimizer: Optimizer, after: Transform | None = None, on_state: Transform | None = None,
    gather: Codec | None = None,
) -> Pipeline:  # fmt: skip
    """One training step as a pure function: gradient transform, optimizer, parameter transform.

    `fjoin.train_step` runs the same pipeline bucket by bucket during the backward pass, with the same result.

    Args:
        hook: The transform of the gradients; `chain(...)` for several, `identity()` for none.
        optimizer: The optimizer, which computes new parameters from gradients.
        after: The transform of the new parameters; it gets them in place of gradients. A reduction in it returns its
            input where no rank has weight.
        on_state: The transform of the optimizer's new state, for example `every(4, average_state("data"))`. It gets a
            tree path -> name -> tensor.
        gather: For a hook with a `scatter_mean`: the codec of the parameters' changes, which every rank adds to its
            parameters. The exact values are kept on their owners. None: the parameters themselves are gathered.

    Where the hook shards, by a `scatter_mean`, each rank steps its own piece, and the ranks gather the parameters. The
    optimizer's state, and `after`, are of this rank's slices.

    Returns:
        A `Pipeline`: `init(params) -> state` and
        `step(params, grads, state, *, weight=None, lane=None, donate=False) -> (params, state)`. With `donate` the caller
        gives up all three: parameters and state are stepped in place, gradients are overwritten, and nothing is copied. The
        parameters returned are the given ones.
        State: `PipelineState(hook, optimizer, after, on_state, step, window, gather)`.

    Raises:
        TypeError: an argument of the wrong kind; at `step`: a leaf of another dtype.
        DonatedState: at `step`: the state was donated to a step before.
        ValueError: at `step`: gradients or state that do not fit the parameters. Two shardings, or a transform that cannot
            work on pieces.
        UnboundAxis: at `init` of a sharded pipeline: nothing binds its axis.

    Same as: torch's _hook_then_optimizer, for any hook and optimizer.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.fuse(tx.clip_by_value(1.0), tx.sgd(0.5))
    >>> params = {"w": torch.tensor([1.0])}
    >>> pipeline.step(params, {"w": torch.tensor([9.0])}, pipeline.init(params))[0]
    {'w': tensor([0.5000])}
    """
    check_transform(hook, "fuse: hook")
    if not isinstance(optimizer, Optimizer):
        hint = "write fuse(hook, optimizer), for example fuse(mean('data'), sgd(0.1))"
        if type(optimizer).__name__.startswith("GradientTransformation"):
            hint = (
                "write fuse(chain(mean('data'), from_optax(...)), sgd(1.0, maximize=True)), which adds optax's updates"
            )
        raise TypeError(f"fuse: optimizer must be an Optimizer, got {optimizer!r}; {hint}")
    if after is not None:
        check_transform(after, "fuse: after")
    if on_state is not None:
        check_transform(on_state, "fuse: on_state")

    return pipeline_of(hook, optimizer, after, on_state, gather)


def pipeline_of(
    hook: Transform, optimizer: Optimizer, after: Transform | None, on_state: Transform | None,
    gather: Codec | None = None, skips: Skips | None = None,
    prepare: Callable[[Tree, Any], Tree] = lambda grads, state: grads,
) -> Pipeline:  # fmt: skip
    """The pipeline of these parts.

    Args:
        skips: For a pipeline that skips steps with non-finite gradients after the hook: the state that counts them.
        prepare: `(grads, state) -> grads`, applied before the hook; the state is that of `skips`.
    """
    plans: dict[tuple[tuple[str, int], ...], Plan] = {}
    sharding = sharding_of(hook, optimizer, after, on_state, gather)

    def pieces_of(params: Tree, state: PipelineState) -> Pieces | None:
        """The pieces of the parameters, of which the state must be."""
        if sharding is None:
            return None
        pieces = sharding.pieces(params)
        sharding.check(pieces, state.gather)
        return pieces

    def held_of(pieces: Pieces | None, params: Tree, state: PipelineState) -> Tree:
        """The parameters that this rank steps."""
        return sharding.held(pieces, params, state.gather) if sharding and pieces else params

    def init(params: Tree) -> State:
        pieces = sharding.pieces(params) if sharding else None
        own = pieces.own(params) if pieces else params
        slots = optimizer.init(own)
        with bind_pieces(pieces):
            hook_state = hook.init(params)
        state = PipelineState(
            hook_state, slots, after.init(masters_of(own, slots)) if after else (),
            on_state.init(state_fields(_by_path(own, slots))) if on_state else (), 0, _nothing(),
            sharding.init(pieces, own, slots) if sharding and pieces else (),
        )  # fmt: skip
        return skips.begin(state) if skips else state

    def inside(state: Any) -> PipelineState:
        old = getattr(state, "inner", None) if skips else state
        if not isinstance(old, PipelineState):
            kind = "state with the field `inner`" if skips else "PipelineState"
            raise ValueError(
                f"state is a {type(state).__name__}, expected the {kind} that this pipeline's init or step returned"
            )
        return old

    def step(
        params: Tree, grads: Tree, state: Any, *, weight: Any = None, lane: Lane | None = None, donate: bool = False,
        **extra: Any,
    ) -> tuple[Tree, State]:  # fmt: skip
        old, call = inside(state), call_of({"weight": weight, "lane": lane, **extra})
        call = call.inside(step=old.step)
        use(old.window, check_flag("donate", donate))
        if not donate or under_vmap():
            return run(params, grads, state, call)
        with torch.no_grad():
            if not plain(params, grads):
                return run(params, grads, state, call)
            return run(params, in_own_memory(grads, params), state, call.inside(donated=True))

    def run(params: Tree, grads: Tree, state: Any, call: Call) -> tuple[Tree, State]:
        outer, old, lane = state, inside(state), call.lane
        check_same("grads", grads, "params", params)
        check_lane(lane)
        for taken in ("weight", rates_check.NAME):
            if lane and taken in lane:
                raise ValueError(f"{taken!r} in the lane is taken by the step itself; choose another name")
        own, pieces = check_weight(call.weight), pieces_of(params, old)
        rates = rates_check.rates_of(optimizer, held_of(pieces, params, old), old.optimizer)
        if old.step == 0 and plain(params, grads):
            rates = [*rates_check.mark_of(hook, optimizer, after, on_state, gather), *rates]
        given = {**(lane or {}), "weight": own, **({rates_check.NAME: rates_check.number_of(rates)} if rates else {})}
        with bind_pieces(pieces):
            grads, hook_state = hook.run(prepare(grads, outer), old.hook, params, call.inside(lane=given))
        own = old.window + own
        if grads is None:  # accumulating: no step in this call
            inner = old._replace(hook=hook_state, window=own)
            return params, outer._replace(inner=inner) if skips else inner
        axes = tuple((name, axis.size) for name, axis in bound().items())
        if axes not in plans:
            plans[axes] = make_plan(hook, dict(axes))
        effect, agreed = _judge(plans[axes], hook_state, grads, old.step, own, bool(skips), rates)
        held = held_of(pieces, params, old)
        new = held, old.optimizer
        if call.donated and pieces is None and effect.steps is not False and are_apart(held):
            bad = (~effect.steps).to(torch.float32) if isinstance(effect.steps, Tensor) else None
            new = step_tree(optimizer, held, grads, old.optimizer, True, bad)
        elif effect.steps is not False:
            new = effect.where(optimizer.step(held, grads, old.optimizer), new)
        held, inner = end(*new, old, effect, call.inside(weight=agreed, lane=None, donated=False))
        params, inner = gathered(pieces, params, held, inner, effect)
        inner = inner._replace(hook=effect.keep(hook_state, old.hook), step=old.step + 1, window=torch.zeros_like(own))
        return params, effect.update_counters(skips, outer._replace(inner=inner)) if skips else inner

    def end(params: Tree, slots: State, old: PipelineState, effect: Effect, call: Call) -> tuple[Tree, PipelineState]:
        """The parameters and the state after the transforms at the end of a step."""
        after_state, slots_state = old.after, old.on_state
        if after:
            masters, after_state = effect.after(after, masters_of(params, slots), after_state, call)
            params, slots = with_masters(masters, params, slots)
        if on_state:
            named = _by_path(params, slots)
            fields, slots_state = effect.after(on_state, state_fields(named), slots_state, call, params)
            replaced = with_state_fields(named, fields)
            slots = map_with_path(lambda path, _: replaced[path], params)
        return params, old._replace(optimizer=slots, after=after_state, on_state=slots_state)

    def gathered(
        pieces: Pieces | None, params: Tree, own: Tree, state: PipelineState, effect: Effect
    ) -> tuple[Tree, PipelineState]:
        """The whole parameters, from those that this rank has stepped."""
        if sharding is None or pieces is None:
            return own, state
        effect = effect.at_end if after else effect
        if effect.steps is False:
            return params, state
        new, found = sharding.gather(pieces, params, own, state.optimizer, state.gather)
        return new if gather is None else effect.where(new, params), state._replace(gather=found)

    def flush(params: Tree, state: Any) -> tuple[Tree, State]:
        old = inside(state)
        for path, leaf in named_leaves(params).items():
            check_dense(f"params[{path!r}]", leaf)
        if readable_without_sync(old.window) and old.window > 0:
            warnings.warn(
                "flush leaves out the gradients of an unfinished window of accumulate(...), which have had no step; call step as often "
                "as its windows say before flush",
                stacklevel=3,
            )
        pieces = pieces_of(params, old)
        held = held_of(pieces, params, old)
        matched(optimizer, held, old.optimizer)
        held, inner = end(held, old.optimizer, old, FLUSH, Call(0.0, step=old.step).inside(flush=True))
        params, inner = gathered(pieces, params, held, inner, FLUSH)
        return params, state._replace(inner=inner) if skips else inner

    return Pipeline(init, step, flush, hook, optimizer, after, on_state, sharding, skips=skips)


def _judge(
    plan: Plan, hook_state: State, grads: Tree, step: int, own: Tensor, skips: bool, rates: rates_check.Rates
) -> tuple[Effect, Tensor]:
    """The effect of a step on this rank, and the weight of all ranks that share its gradients.

    Args:
        hook_state: The hook's state after this step.
        grads: The gradients after the hook.
        step: The number of steps before this one.
        own: The weight of this rank.
        skips: Whether the gradients must be finite.
        rates: The hyperparameters of this rank.
    """
    axes, equal = plan.reduced(step)
    agreed, fine = own, all_finite(grads) if skips else torch.ones((), dtype=torch.bool)
    if equal:
        assert plan.hook.sums is not None
        sums = plan.hook.sums(hook_state).lane
        agreed = sums["weight"]
        if rates:
            rates_check.check_sum(rates, sums[rates_check.NAME], axes, step)
    elif axes:
        words = [to_device(fine.device, own), (~fine).to(own.dtype)]
        words += [own.new_full((), rates_check.number_of(rates)).to(fine.device)] if rates else []
        agreed, bad, *numbers = psum(torch.stack(words), axes)
        fine = bad == 0
        if rates:
            rates_check.check_sum(rates, numbers[0], axes, step)
    if skips and equal and (sharded := plan.hook.sharded_over):
        fine = psum((~fine).to(torch.float64), sharded) == 0
    return Effect(flag(agreed > 0), flag(fine)), agreed


def _by_path(params: Tree, slots: State) -> dict[str, Any]:
    """Path -> optimizer state."""
    paths, _, structure = optree.tree_flatten_with_path(params)
    return dict(zip(map(path_string, paths), structure.flatten_up_to(slots), strict=True))


def _nothing() -> Tensor:
    return torch.zeros((), dtype=torch.float64)
