"""A gradient transform, an optimizer and a parameter transform as one step."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from .. import base, optimizers
from ..axes import bound, check_late_weight, psum
from ..base import KEYWORDS, Call, State, Transform, Tree, checks, devices, factory, shares, timings, trees
from ..codecs import Codec
from ..combinators import chain, stages
from ..layout import Pieces, bind_pieces
from ..optimizers import Matched, Optimizer, masters_of, matched, state_fields, with_masters, with_state_fields
from ..reductions import mean_with_words, scatter_mean
from . import _pipeline
from ._pipeline import FLUSH, Effect, Flag, Pipeline, PipelineState, Skips, are_apart, flag, mark_of, totals_of_step
from ._plan import StepReduction, make_plan
from ._sharded import LocalSharding, by_path, in_pieces, of_sums, sharding_of


@factory
def fuse(
    hook: Transform,
    optimizer: Optimizer,
    after: Transform | None = None,
    on_state: Transform | None = None,
    gather_codec: Codec | None = None,
    sharded_over: str | None = None,
) -> Pipeline:
    """One training step as a pure function: gradient transform, optimizer, parameter transform.

    `fjoin.train_step` runs the same pipeline bucket by bucket during the backward pass, with the same result.

    Args:
        hook: The transform of the gradients; `chain(...)` for several, `identity()` for none.
        optimizer: The optimizer, which computes new parameters from gradients.
        after: The transform of the new parameters; it gets them in place of gradients. A reduction in it returns its
            input where no rank has weight.
        on_state: The transform of the optimizer's new state, for example `every(4, average_state("data"))`. It gets a
            tree path -> name -> tensor.
        gather_codec: For a hook with a `scatter_mean`: the codec of the parameters' changes, which every rank adds to
            its parameters. The exact values are kept on their owners. None: the parameters themselves are gathered.
        sharded_over: For a loop of one's own in which each rank has only pieces of the parameters, of any shapes, and
            gathers them in its loss by `all_gather` over this axis: its backward pass sums gradients, so the loss
            carries the weight, and the hook's mean over the axis, which must come first, only divides by their sum.
            Norms are those of all pieces.

    Where the hook shards, by a `scatter_mean`, each rank steps its own piece, and the ranks gather the parameters. The
    optimizer's state, and `after`, are of this rank's slices.

    Returns:
        A `Pipeline`: `init(params) -> state` and
        `step(params, grads, state, *, weight=None, donate=False) -> (params, state)`. With `donate` the caller
        gives up all three: parameters and state are stepped in place, and gradients are overwritten. The parameters
        returned are the given ones, unless `after` or a gather makes others. State: `PipelineState(hook, optimizer,
        after, on_state, step, window, gather)`.

    Raises:
        TypeError: an argument of the wrong kind; at `step`: a leaf of another dtype.
        DonatedState: at `step`: the state was donated to a step before.
        ValueError: at `step`: gradients or state that do not fit the parameters. Two shardings, or a transform that
            cannot work on pieces; with `sharded_over` a hook that does not begin with a mean over it.
        UnboundAxis: at `init` of a sharded pipeline: nothing binds its axis.

    Same as: torch's _hook_then_optimizer, for any hook and optimizer.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.fuse(tx.clip_by_value(1.0), tx.sgd(0.5))
    >>> params = {"w": torch.tensor([1.0])}
    >>> pipeline.step(params, {"w": torch.tensor([9.0])}, pipeline.init(params))[0]
    {'w': tensor([0.5000])}
    """
    if not isinstance(optimizer, Optimizer):
        got, hint = repr(optimizer), "write fuse(hook, optimizer), for example fuse(mean('data'), sgd(0.1))"
        if isinstance(optimizer, torch.optim.Optimizer):
            got = f"torch's {type(optimizer).__name__}"
            hint = "write fuse(hook, tx.sgd(lr)), or another of the functional optimizers"
        raise TypeError(f"fuse: optimizer must be an Optimizer, got {got}; {hint}")
    in_hook, at_end = (stages(part) if isinstance(part, Transform) else [] for part in (hook, after))
    if any(base.Needs.VALUES in part.needs or part.facts.equalizes for part in in_hook):
        remedy = "write fuse(hook, optimizer, after=ema(...))"
        raise TypeError(f"fuse: {hook!r} is of parameters, not of gradients: {remedy}")
    if any(part.facts.by_norm for part in at_end):
        raise TypeError(f"fuse: {after!r} would scale the parameters; it is of gradients, and a stage of the hook")
    if sharded_over is not None:
        hook = of_sums(hook, sharded_over)
    return pipeline_of(hook, optimizer, after, on_state, gather_codec)


def pipeline_of(
    hook: Transform,
    optimizer: Optimizer,
    after: Transform | None,
    on_state: Transform | None,
    gather_codec: Codec | None = None,
    skips: Skips | None = None,
    pieces: Pieces | None = None,
) -> Pipeline:
    """The pipeline of these parts.

    Args:
        skips: For a pipeline that skips steps with non-finite gradients after the hook: the state that counts them.
        pieces: For a hook whose gradients arrive in pieces: these, where it is known how they make up whole parameters.
    """
    sharding = sharding_of(hook, optimizer, after, on_state, gather_codec)
    if pieces is not None:
        sharding = LocalSharding(pieces.axis, optimizer, pieces)
    gathers = sharding is not None and sharding.gathers
    alike, parts = not timings.changes_with_steps(hook), stages(hook)
    behind_sum = chain(replace(parts[0], update=_as_they_are), *parts[1:]) if parts else hook
    plans: dict[tuple[tuple[str, int], ...], Any] = {}  # by the axes that are bound

    @devices.constant  # in a compiled step these are constants, so no transform is among them
    def how(step: int) -> tuple[StepReduction, bool]:
        """How the hook reduces in a step over the axes that are bound here, and whether its first stage is all of that,
        a plain one.
        """
        axes = tuple((name, axis.size) for name, axis in bound().items())
        if axes not in plans:
            plans[axes] = make_plan(hook, dict(axes))
        plan = plans[axes]
        return plan.reduced(step), plan.reduce is not None and not behind_sum.sharded_over

    def stepped(params: Tree, state: PipelineState) -> tuple[Pieces | None, Tree]:
        """What this rank steps of the parameters: the pieces, of which the state must be, and their values."""
        if sharding is None:
            return None, params
        pieces = sharding.pieces(params)
        sharding.check(pieces, state.gather)
        return pieces, sharding.held(pieces, params, state.gather)

    def init(params: Tree) -> State:
        if skips and skips.scaled:
            _pipeline.refuse_float16(params)
        pieces = sharding.pieces(params) if sharding else None
        own = pieces.own(params) if pieces else params
        slots = optimizer.init(own)
        with bind_pieces(pieces):
            hook_state = hook.init(params)
        state = PipelineState(
            hook_state,
            slots,
            after.init(masters_of(own, slots)) if after else (),
            on_state.init(state_fields(by_path(own, slots))) if on_state else (),
            0,
            torch.zeros((), dtype=torch.float64),
            sharding.init(pieces, own, slots) if sharding and pieces else (),
        )
        return skips.begin(state) if skips else state

    def inside(state: Any) -> PipelineState:
        old = getattr(state, "inner", None) if skips else state
        if not isinstance(old, PipelineState):
            raise ValueError(f"state is a {type(state).__name__}, expected one that init or step returned")
        return old

    def put(state: Any, new: PipelineState) -> Any:
        return trees.with_changes(state, inner=new) if skips else new

    def step(
        params: Tree, grads: Tree, state: Any, *, weight: Any = None, donate: bool = False, **extra: Any
    ) -> tuple[Tree, State]:
        old = inside(state)
        if taken := {"call", *KEYWORDS}.intersection(extra):
            remedy = "keywords for transforms need other names"
            raise TypeError(f"step takes no {min(taken)!r}, which it sets itself; {remedy}")
        # A shell that knows sums of weights already, or wants to know those of the step, gives its own call.
        call = weight.inside(step=old.step) if isinstance(weight, Call) else Call(weight, old.step)
        call = call.inside(extra=extra) if extra else call
        own = matched(optimizer, params, grads, old.optimizer) if sharding is None else None
        if own is None:
            trees.check_same("grads", grads, "params", params)
        _pipeline.use(old.window, checks.flag("donate", donate))  # a call that is refused has used up nothing
        if not donate:
            return run(params, grads, state, call, own)
        with torch.no_grad():
            leaves, given = (own.params, own.grads) if own else (optree.tree_leaves(params), optree.tree_leaves(grads))
            if trees.plain(leaves, given):
                apart = are_apart([*leaves, *given])
                if not apart:  # gradients that share memory cannot be overwritten, but copies of them can
                    given = [g.clone() for g in given]
                    grads = optree.tree_unflatten(optree.tree_structure(grads), given)
                    apart = are_apart([*leaves, *given])
                # A transform may keep parameters that it has got or returned.
                kept = old.hook, old.after, old.on_state
                states = trees.copy_if_aliased(kept, (params, old.optimizer))
                if states is not kept:
                    state = put(state, trees.with_changes(old, hook=states[0], after=states[1], on_state=states[2]))
                call = call.inside(donated=True) if apart else call
            return run(params, grads, state, call, own)

    def run(params: Tree, grads: Tree, state: Any, call: Call, own: Matched | None) -> tuple[Tree, State]:
        """A step; `own` has the parameters and states, where no rank steps pieces of them."""
        old = inside(state)
        pieces, held = stepped(params, old)
        rates = _pipeline.rates_of(optimizer, held, old.optimizer)
        if not alike and old.step:
            rates = []  # the optimizers of ranks that have stepped alone may differ in their counts
        if old.step == 0 and trees.plain(params, grads):
            rates = [*mark_of(hook, optimizer, after, on_state, gather_codec), *rates]
        if skips and skips.scaled:
            grads = _pipeline.unscaled(grads, state.scale)

        (axes, equal, *_), is_plain = how(0 if alike else old.step)
        # In the loss of gradients that arrive in sums there is the weight already.
        check_late_weight(call, grads, axes if gathers or sharding is None else {*axes} - {sharding.axis})
        with bind_pieces(pieces):
            # The sum of weight * gradient carries the weights, and is divided by theirs: no message is added.
            structure: Any = own.structure if own else optree.tree_structure(grads)
            leaves: list[Any] = structure.flatten_up_to(grads)
            late = call.donated and len(parts) == 1 and pieces is None and not skips
            found = total = None
            if is_plain:
                found = mean_with_words(parts[0], leaves, call, _pipeline.words_to_sum(call, rates), late)
            if found is not None:
                leaves, summed, total = found
                grads = optree.tree_unflatten(structure, leaves)
                totals = _pipeline.totals_from(call, axes, rates, summed)
            elif not hook.facts.pauses:
                totals = totals_of_step(call, axes, rates, params)
                grads = grads if equal or not axes else _pipeline.zero_unless_live(call, grads)
            mean, hook_state = (hook if found is None else behind_sum).run(grads, old.hook, params, call)
        if mean is None or hook.facts.pauses:
            window = old.window + trees.to_device(old.window.device, torch.as_tensor(shares.weight_of(call.weight)))
            if mean is None:
                return params, put(state, trees.with_changes(old, hook=hook_state, window=window))
            totals = totals_of_step(call.inside(weight=window), axes, rates, params)

        fine: Flag = True
        if skips:
            finite, other = trees.all_finite(mean), (sharding.axis,) if sharding else () if equal else axes
            fine = flag(psum((~finite).to(torch.float64), other) == 0 if other else finite)
        effect = Effect(flag(totals.weight > 0), fine)

        slots = old.optimizer
        ends = call.inside(weight=totals.weight, donated=False, sharded_over=pieces and pieces.axis)
        if effect.steps is not False:
            if own is None:
                own = matched(optimizer, held, mean, slots)
            elif found is None or len(parts) > 1:
                trees.check_same("grads", mean, "params", held)
            own = trees.with_changes(own, grads=own.structure.flatten_up_to(mean))
            if call.donated and not gathers:
                hook_state = trees.copy_if_aliased(hook_state, (held, mean))
                bad = (~effect.steps).to(torch.float32) if isinstance(effect.steps, Tensor) else None
                held, slots = optimizers.step(optimizer, own, True, found_inf=bad, grad_scale=total)
            else:
                held, slots = effect.where(optimizers.step(optimizer, own), (held, slots))
        kept = effect.keep(hook_state, old.hook)
        window = torch.zeros_like(old.window)
        new = trees.with_changes(old, hook=kept, optimizer=slots, step=old.step + 1, window=window)
        params, new = finish(params, held, new, pieces, ends, effect)
        outer = put(state, new)
        return params, effect.update_counters(skips, outer) if skips else outer

    def finish(
        params: Tree, held: Tree, new: PipelineState, pieces: Pieces | None, call: Call, effect: Effect
    ) -> tuple[Tree, PipelineState]:
        """What comes after the optimizer: the transforms of parameters and of its state, and the gather of the pieces."""
        slots = new.optimizer
        if after is not None:
            masters, kept = effect.after(after, masters_of(held, slots), new.after, call)
            held, slots = with_masters(masters, held, slots)
            new = trees.with_changes(new, after=kept, optimizer=slots)
        if on_state is not None:
            named = by_path(held, slots)
            fields, kept = effect.after(on_state, state_fields(named), new.on_state, call, held)
            replaced = with_state_fields(named, fields)
            slots = trees.map_with_path(lambda path, _: replaced[path], held)
            new = trees.with_changes(new, on_state=kept, optimizer=slots)
        if sharding is None or pieces is None or not gathers:
            return held, new
        # A transform of the parameters may have changed them in a step without effect too.
        gathered = effect if after is None else effect.at_end
        if gathered.steps is False:
            return params, new
        whole, gather = sharding.gather(pieces, params, held, slots, new.gather)
        params = whole if gather_codec is None else gathered.where(whole, params)
        return params, trees.with_changes(new, gather=gather)

    def flush(params: Tree, state: Any) -> tuple[Tree, State]:
        old = inside(state)
        trees.check_same("params", params, "params", params)
        if trees.readable_without_sync(old.window) and old.window > 0:
            lost = "flush leaves out the gradients of an unfinished window of accumulate(...), which have had no step"
            warnings.warn(f"{lost}; call step as often as its windows say before flush", stacklevel=3)
        pieces, held = stepped(params, old)
        matched(optimizer, held, held, old.optimizer)
        call = Call(0.0, step=old.step).inside(flush=True, sharded_over=pieces and pieces.axis)
        params, new = finish(params, held, old, pieces, call, FLUSH)
        return params, put(state, new)

    return Pipeline(init, step, flush, hook, optimizer, after, on_state, sharding, skips=skips)


def _as_they_are(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
    return grads, state


@factory
def zero(
    hook: Transform,
    optimizer: Optimizer,
    axis: str,
    *,
    after: Transform | None = None,
    on_state: Transform | None = None,
    gather_codec: Codec | None = None,
) -> Pipeline:
    """ZeRO, stage 1: the optimizer's state and its work are shared out among the ranks of an axis.

    `fuse` with a hook in which each `mean` over `axis` is a `scatter_mean`. A mean over several axes becomes a
    scatter_mean over `axis` and a mean over the others.

    Args:
        hook: A transform of the gradients that holds one `mean` over `axis`.
        optimizer: Any optimizer.
        axis: The axis over which to shard.
        after, on_state, gather_codec: As for `fuse`.

    Returns:
        A `Pipeline`: `fuse(scatter_mean(axis), optimizer)` for the hook `mean(axis)`, and so on.

    Raises:
        ValueError: `hook` holds no mean over `axis`; as `fuse`.
        TypeError: as `fuse`.

    Same as: torch's ZeroRedundancyOptimizer and DeepSpeed's stage 1.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054.

    >>> from fjoin import transforms as tx
    >>> tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(1e-3), "data").hook
    chain(scatter_mean('data'), clip_by_global_norm(1.0))
    """
    if not isinstance(axis, str):
        raise TypeError(f"zero takes the name of one axis, got {axis!r}")
    sharded = in_pieces(hook, axis, scatter_mean)
    if not sharded.sharded_over:
        raise ValueError(f"zero: {hook!r} holds no mean over {axis!r}; write zero(mean({axis!r}), ...)")
    return fuse(sharded, optimizer, after, on_state, gather_codec)


def of_slices(pipeline: Pipeline, axis: str, pieces: Pieces) -> Pipeline:
    """The pipeline for slices of which each rank has only its own, whose gradients arrive as sums over an axis.

    Args:
        pieces: The slices that this rank steps.

    Raises:
        ValueError: its hook does not begin with a mean over the axis.
    """
    hook, ends = of_sums(pipeline.hook, axis), (pipeline.after, pipeline.on_state)
    made = pipeline_of(hook, pipeline.optimizer, *ends, skips=pipeline.skips, pieces=pieces)
    return replace(made, spec=pipeline.spec)
