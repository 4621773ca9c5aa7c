"""A gradient transform, an optimizer and a parameter transform as one step."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..axes import bound
from ..base import (
    NAMES,
    Call,
    Lane,
    State,
    Transform,
    Tree,
    changes_with_steps,
    check_dense,
    check_lane,
    check_same,
    check_transform,
    constant,
    factory,
    flag as check_flag,
    named_leaves,
    plain,
    readable_without_sync,
    with_changes,
)
from ..codecs import Codec
from ..combinators import LIVE, WEIGHTS
from ..layout import Pieces, bind_pieces
from ..optimizers import Optimizer, masters_of, matched, state_fields
from ._pipeline import NAME as RATES, Pipeline, Skips, in_own_memory, use
from ._plan import make_plan
from ._program import FLUSH, Parts, Program, Programs, execute
from ._sharded import sharding_of
from ._tree_memory import Owner, PipelineState, TreeMemory, by_path


@factory
def fuse(
    hook: Transform,
    optimizer: Optimizer,
    after: Transform | None = None,
    on_state: Transform | None = None,
    gather_codec: Codec | None = None,
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
        gather_codec: For a hook with a `scatter_mean`: the codec of the parameters' changes, which every rank adds to its
            parameters. The exact values are kept on their owners. None: the parameters themselves are gathered.

    Where the hook shards, by a `scatter_mean`, each rank steps its own piece, and the ranks gather the parameters. The
    optimizer's state, and `after`, are of this rank's slices.

    Returns:
        A `Pipeline`: `init(params) -> state` and
        `step(params, grads, state, *, weight=None, lane=None, donate=False) -> (params, state)`. With `donate` the caller
        gives up all three: parameters and state are stepped in place, and gradients are overwritten. The parameters returned
        are the given ones, unless `after` or a gather makes others.
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
        got = repr(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            got, hint = (
                f"torch's {type(optimizer).__name__}",
                "write fuse(hook, tx.sgd(lr)), or another of the functional optimizers",
            )
        raise TypeError(f"fuse: optimizer must be an Optimizer, got {got}; {hint}")
    if after is not None:
        check_transform(after, "fuse: after")
    if on_state is not None:
        check_transform(on_state, "fuse: on_state")

    return pipeline_of(hook, optimizer, after, on_state, gather_codec)


def pipeline_of(
    hook: Transform,
    optimizer: Optimizer,
    after: Transform | None,
    on_state: Transform | None,
    gather_codec: Codec | None = None,
    skips: Skips | None = None,
) -> Pipeline:
    """The pipeline of these parts.

    Args:
        skips: For a pipeline that skips steps with non-finite gradients after the hook: the state that counts them.
    """
    sharding = sharding_of(hook, optimizer, after, on_state, gather_codec)
    owner = Owner(hook, optimizer, after, on_state, gather_codec, sharding, skips is not None)
    parts = Parts(after, on_state, sharding.axis if sharding else None, skips is not None)
    programs: dict[tuple[tuple[str, int], ...], Programs] = {}  # by the axes that are bound
    alike = not changes_with_steps(hook)

    @constant  # a compiled step has one program
    def program_of(step: int) -> Program:
        """The program of a step over the axes that are bound here."""
        axes = tuple((name, axis.size) for name, axis in bound().items())
        if axes not in programs:
            programs[axes] = Programs(make_plan(hook, dict(axes)), parts, "tree")
        return programs[axes].of(step)

    def pieces_of(params: Tree, state: PipelineState) -> Pieces | None:
        """The pieces of the parameters, of which the state must be."""
        if sharding is None:
            return None
        pieces = sharding.pieces(params)
        sharding.check(pieces, state.gather)
        return pieces

    def init(params: Tree) -> State:
        if skips and skips.check:
            skips.check(params)
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
            kind = "state with the field `inner`" if skips else "PipelineState"
            raise ValueError(
                f"state is a {type(state).__name__}, expected the {kind} that this pipeline's init or step returned"
            )
        return old

    def step(
        params: Tree,
        grads: Tree,
        state: Any,
        *,
        weight: Any = None,
        lane: Lane | None = None,
        donate: bool = False,
        **extra: Any,
    ) -> tuple[Tree, State]:
        old = inside(state)
        if taken := (NAMES | {"call"}).intersection(extra):
            raise TypeError(
                f"step takes no {min(taken)!r}, which is the step's own; keywords for transforms need other names"
            )
        call = Call(weight, lane, old.step).inside(extra=extra)
        use(old.window, check_flag("donate", donate))
        if not donate:
            return run(params, grads, state, call)
        with torch.no_grad():
            if not plain(params, grads):
                return run(params, grads, state, call)
            return run(params, in_own_memory(grads, params), state, call.inside(donated=True))

    def run(params: Tree, grads: Tree, state: Any, call: Call) -> tuple[Tree, State]:
        old, lane = inside(state), call.lane
        check_same("grads", grads, "params", params)
        check_lane(lane)
        for taken in ("weight", RATES, WEIGHTS, LIVE):
            if lane and taken in lane:
                raise ValueError(f"{taken!r} in the lane is taken by the step itself; choose another name")
        memory = TreeMemory(owner, params, old, pieces_of(params, old), call)
        memory.begin(skips.prepare(grads, state) if skips else grads, plain(params, grads))
        effect = execute(program_of(0 if alike else old.step), memory)
        inner = memory.state
        if not skips:
            return memory.params, inner
        outer = with_changes(state, inner=inner)
        return memory.params, outer if effect is None else effect.update_counters(skips, outer)

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
        call = Call(0.0, step=old.step).inside(flush=True)
        memory = TreeMemory(owner, params, old, pieces_of(params, old), call)
        matched(optimizer, memory.held, old.optimizer)
        execute(parts.ends, memory, FLUSH)
        return memory.params, with_changes(state, inner=memory.state) if skips else memory.state

    return Pipeline(init, step, flush, hook, optimizer, after, on_state, sharding, skips=skips)
