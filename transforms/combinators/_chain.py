"""`chain` composes transforms; `identity` and `stateless` make simple ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from ..base import (
    Call,
    Group,
    Needs,
    Over,
    Reduction,
    Spec,
    State,
    Transform,
    Tree,
    axis_names,
    check_transform,
    children,
    factory,
    flag,
    init_empty,
    share_in,
)
from ..layout import pieces_here


@factory
def chain(*transforms: Transform) -> Transform:
    """Runs transforms one after the other, left to right.

    Nested chains are flattened and identities dropped. A chain of one transform is that transform; an empty chain is
    `identity()`. A stage that reduces passes its total as the weight, and its sums as the lane, to the stages after it:
    `chain(mean("local"), mean("node"))` is the mean over both axes. When a stage returns None for the gradients, the
    stages after it are not run.

    Returns:
        A `Transform`; its state is the tuple of the stages' states.

    Raises:
        TypeError: an argument is no transform; an optimizer is an argument of `fuse`.
        ValueError: a reduction comes after `accumulate`.

    Same as: optax.chain.

    >>> from fjoin import transforms as tx
    >>> both = tx.chain(tx.clip_by_value(1.0), tx.stateless(lambda g: g * 10))
    >>> both.update(torch.tensor(3.0), both.init(torch.tensor(0.0)))[0]
    tensor(10.)
    """
    parts: list[Transform] = []
    for i, transform in enumerate(transforms):
        check_transform(transform, f"chain: argument {i}")
        parts += stages(transform)
    if not parts:
        return identity()
    if len(parts) == 1:
        return parts[0]
    for i, part in enumerate(parts):
        if part.pauses and any(later.sums for later in parts[i + 1 :]):
            raise ValueError(
                "chain: a reduction after accumulate would not know the weight of the window; put it inside: "
                "accumulate(steps, chain(...))"
            )

    def init(params: Tree) -> State:
        states = []
        for i, part in enumerate(parts):
            states.append(part.init(params))
            if part.sharded_over and parts[i + 1 :]:
                params = pieces_here(params, part.sharded_over).own(params)
        return tuple(states)

    needed = counts_needed(parts)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        if len(state) != len(parts):
            raise ValueError(
                f"this chain has {len(parts)} stages, but the state has {len(state)}; it is another pipeline's state"
            )
        new, whole, call = list(state), grads, counting(needed, call)
        for i, part in enumerate(parts):
            if i == 1 and call.donated:
                call = call.inside(donated=False)  # a stage may keep its result in its state
            grads, new[i] = part.run(grads, state[i], params, call)
            if grads is None:
                break
            call = behind(part, new[i], call)
            if part.sharded_over and parts[i + 1 :]:
                params = None if params is None else pieces_here(whole, part.sharded_over).own(params)
        return grads, tuple(new)

    reducing = [i for i, part in enumerate(parts) if part.reduces]

    def last_sums(state: State) -> Any:
        return parts[reducing[-1]].sums(state[reducing[-1]])  # type: ignore[misc]

    spec = Spec("chain", (("transforms", tuple(parts)),))
    reduces = Reduction(last_sums) if reducing else None
    return Transform(init, update, Needs.NOTHING, reduces, takes=("donated",), wraps="stages", spec=spec)


# Scalars that a chain adds to the lane, where a later stage counts the ranks in another way than the one before.
WEIGHTS, LIVE = "weight of the ranks", "ranks with input"


def counts_needed(parts: Sequence[Transform]) -> tuple[tuple[str, Over], ...]:
    """The names and kinds of the counts that these stages need, where one counts ranks in another way than one before it."""
    kinds = [part.reduces.over or "weight" for part in parts if part.reduces]
    both: tuple[tuple[str, Over], ...] = ((WEIGHTS, "weight"), (LIVE, "live"))
    return tuple(
        (name, kind)
        for name, kind in both
        if any(kind in kinds[i + 1 :] and before != kind for i, before in enumerate(kinds))
    )


def counting(needed: Sequence[tuple[str, Over]], call: Call) -> Call:
    """The call with these counts in its lane."""
    if not needed:
        return call
    added = {name: share_in(call, kind).factor for name, kind in needed}
    return call.inside(lane={**(call.lane or {}), **added})


def behind(part: Transform, state: State, call: Call) -> Call:
    """The call of the stage behind another one: after a reduction, with its sums; after an average, with the weight of all.

    Args:
        part: The stage before.
        state: Its new state.
    """
    if part.reduces is not None:
        found, over, axis = part.reduces.sums(state), part.reduces.over, part.reduces.axis
        weight = found.lane.get(WEIGHTS, found.total if over in (None, "weight") else None)
        live = found.total if over == "live" else found.lane.get(LIVE)
        axes = (*(() if call.group is None else call.group.axes), *(() if axis is None else axis_names(axis)))
        call = call.inside(weight=found.total, lane=found.lane, group=Group(weight, live, axes))
    elif part.equalizes is not None:  # a rank without input has new values too
        call = call.inside(weight=part.equalizes(state))
    return call.inside(sharded_over=part.sharded_over) if part.sharded_over else call


def behind_all(parts: Sequence[Transform], state: State, call: Call) -> Call:
    """The call of the stage behind several.

    Args:
        state: The new state of these stages, as one transform: a tuple, or that of a single stage.
    """
    for part, own in zip(parts, state if len(parts) > 1 else (state,), strict=True):
        call = behind(part, own, call)
    return call


def stages(transform: Transform) -> list[Transform]:
    """The stages of a chain; any other transform is its own only stage, and identity has none."""
    return children(transform) if transform.wraps == "stages" else [transform]


@factory
def identity() -> Transform:
    """Returns the gradients unchanged: every rank keeps its own.

    As a hook it sends nothing, and is meant to: it is the hook of methods that average parameters, and the upper bound of
    the time that any hook can save.

    Same as: optax.identity; torch's ddp_comm_hooks.debugging_hooks.noop_hook.

    >>> identity().update(torch.tensor(1.0), ())
    (tensor(1.), ())
    """

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        del params, call
        return grads, state

    return Transform(init_empty, update, Needs.NOTHING, wraps="stages", silent=True)


@factory
def stateless(function: Callable[..., Any], elementwise: bool = False) -> Transform:
    """A transform from a function of one gradient leaf.

    Args:
        function: `grad -> grad`, pure, of the same shape and dtype.
        elementwise: Whether each element of the result depends on that element of the gradient alone; the function may
            then be called on one flat buffer of many leaves.

    Returns:
        A `Transform` without state.

    Raises:
        TypeError: `function` is none; `elementwise` is no bool.

    Same as: optax.stateless_with_tree_map.

    >>> stateless(torch.sign).update({"w": torch.tensor([-2.0, 3.0])}, ())
    ({'w': tensor([-1.,  1.])}, ())
    """
    if not callable(function):
        raise TypeError(f"stateless takes a function of one gradient leaf, got {function!r}")
    flag("elementwise", elementwise)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        del params, call
        return optree.tree_map(function, grads), state

    return Transform(init_empty, update, Needs.NOTHING if elementwise else Needs.LEAVES)
