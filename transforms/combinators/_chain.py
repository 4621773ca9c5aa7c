"""`chain` composes transforms; `identity` and `stateless` make simple ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from .._bucketwise import FirstBucket, substate
from .._check import flag
from .._spec import Spec, factory
from .._transform import Needs, Reduction, Transform, check_transform, donate_kwargs, flush_kwargs, init_empty
from .._tree import State, Tree
from ..layout._pieces import pieces_here


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

    def update(
        grads: Tree, state: State, params: Tree = None, *, weight: Any = None, lane: Any = None,
        first_bucket: FirstBucket | None = None, donated: bool = False, flush: bool = False, **extra: Any,
    ) -> tuple[Tree, State]:  # fmt: skip
        if len(state) != len(parts):
            raise ValueError(
                f"this chain has {len(parts)} stages, but the state has {len(state)}; it is another pipeline's state"
            )
        new, whole = list(state), grads
        for i, part in enumerate(parts):
            if flush and not part.accepts("flush"):
                continue
            there = substate(first_bucket, i)
            lent = donate_kwargs(part, donated and i == 0)  # a stage may keep its result in its state
            grads, new[i] = part.update(
                grads,
                state[i],
                params,
                weight=weight,
                lane=lane,
                first_bucket=there,
                **lent,
                **flush_kwargs(part, flush),
                **extra,
            )
            if grads is None:
                break
            if part.sums:
                sums = part.sums(new[i])
                weight, lane = sums.total, sums.lane
            if part.sharded_over and parts[i + 1 :]:
                extra["sharded_over"] = part.sharded_over
                params = None if params is None else pieces_here(whole, part.sharded_over).own(params)
        return grads, tuple(new)

    reducing = [i for i, part in enumerate(parts) if part.reduces]

    def last_sums(state: State) -> Any:
        return parts[reducing[-1]].sums(state[reducing[-1]])  # type: ignore[misc]

    spec = Spec("chain", (("transforms", tuple(parts)),))
    return Transform(init, update, Needs.NOTHING, Reduction(last_sums) if reducing else None, spec=spec)


def stages(transform: Transform) -> list[Transform]:
    """The stages of a chain; any other transform is its own only stage, and identity has none."""
    if transform.spec.name == "chain":
        return list(transform.spec["transforms"])
    if transform.spec.name == "identity":
        return []
    return [transform]


@factory
def identity() -> Transform:
    """Returns the gradients unchanged.

    >>> identity().update(torch.tensor(1.0), ())
    (tensor(1.), ())
    """

    def update(grads: Tree, state: State, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        del params, extra
        return grads, state

    return Transform(init_empty, update, Needs.NOTHING)


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

    def update(grads: Tree, state: State, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        del params, extra
        return optree.tree_map(function, grads), state

    return Transform(init_empty, update, Needs.NOTHING if elementwise else Needs.LEAVES)
