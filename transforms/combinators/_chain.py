"""`chain` composes transforms; `identity` and `stateless` make simple ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from ..base import Call, Facts, Needs, Spec, State, Transform, Tree, factory, timings
from ..layout import pieces_here


@factory
def chain(*transforms: Transform) -> Transform:
    """Runs transforms one after the other, left to right.

    Nested chains are flattened and identities dropped. A chain of one transform is that transform; an empty chain is
    `identity()`. After a stage that reduces, the weight is the sum of its ranks' weights: `chain(mean("local"),
    mean("node"))` is the mean over both axes. When a stage returns None for the gradients, the stages after it are not
    run.

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
    parts = [stage for transform in transforms for stage in stages(transform)]
    if not parts:
        return identity()
    if len(parts) == 1:
        return parts[0]
    for i, part in enumerate(parts):
        if part.facts.pauses and any(later.is_reducing for later in parts[i + 1 :]):
            raise ValueError(
                "chain: a reduction after accumulate would not know the weight of the window; write accumulate(steps, chain(...))"
            )

    def init(params: Tree) -> State:
        states = []
        for i, part in enumerate(parts):
            states.append(part.init(params))
            if part.sharded_over and parts[i + 1 :]:
                params = pieces_here(params, part.sharded_over).own(params)
        return tuple(states)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        if len(state) != len(parts):
            raise ValueError(
                f"this chain has {len(parts)} stages, but the state has {len(state)}; it is another pipeline's state"
            )
        new, whole = list(state), grads
        for i, part in enumerate(parts):
            if i == 1 and call.donated:
                call = call.inside(donated=False)  # a stage may keep its result in its state
            grads, new[i] = part.run(grads, state[i], params, call)
            if grads is None:
                break
            call = behind(part, call)
            if part.sharded_over and parts[i + 1 :]:
                params = None if params is None else pieces_here(whole, part.sharded_over).own(params)
        return grads, tuple(new)

    spec = Spec("chain", (("transforms", tuple(parts)),))
    return Transform(init, update, Needs.NOTHING, spec=spec, facts=Facts(takes=("donated",), wraps="stages"))


def behind(part: Transform, call: Call) -> Call:
    """The call of the stage behind another one. After a reduction its weight is the sum over the ranks that took part."""
    if part.facts.reduces is None and part.facts.equalizes is None and part.facts.wraps is None:
        return call
    axes = (*call.axes, *sorted(timings.reduced_over(part, call.step)))
    return call.inside(axes=axes, sharded_over=part.sharded_over or call.sharded_over)


def stages(transform: Transform) -> list[Transform]:
    """The stages of a chain; any other transform is its own only stage, and identity has none."""
    return timings.children(transform) if transform.facts.wraps == "stages" else [transform]


@factory
def identity() -> Transform:
    """Returns the gradients unchanged: every rank keeps its own.

    As a hook it sends nothing, and is meant to: it is the hook of methods that average parameters, and the upper bound
    of the time that any hook can save.

    Same as: optax.identity; torch's ddp_comm_hooks.debugging_hooks.noop_hook.

    >>> identity().update(torch.tensor(1.0), ())
    (tensor(1.), ())
    """

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        return grads, state

    return Transform(lambda params: (), update, Needs.NOTHING, facts=Facts(wraps="stages", silent=True))


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

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        return optree.tree_map(function, grads), state

    return Transform(lambda params: (), update, Needs.NOTHING if elementwise else Needs.LEAVES)
