"""Putting transforms together: chain, masked, partition, and the two that make one from nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, overload

import optree

from ._base import Optimizer, Scope, Transform, check_transform, init_empty
from ._bucketwise import Carried, part_of
from ._spec import Spec, factory
from ._tree import State, Tree, named_leaves, path_string

Patterns: TypeAlias = str | tuple[str, ...]
Which: TypeAlias = str | Sequence[str] | Callable[[str], bool]

_WIDTH: dict[Scope, int] = {"element": 0, "leaf": 1, "message": 2, "tree": 3}


def widest(parts: Sequence[Transform]) -> Scope:
    """The scope of things run one after the other: the most demanding one's."""
    return max((part.scope for part in parts), key=_WIDTH.__getitem__, default="element")


@factory
def chain(*transforms: Transform) -> Transform:
    """Run transforms one after the other, left to right.

    Nested chains are flattened, identities dropped; a chain of one is that one, a chain of none is
    `identity()`. A stage that reduces hands its total on as the weight, and its sums as the lane,
    to the stages after it, so that `chain(mean("local"), mean("node"))` is the mean over both. When
    a stage returns None for the gradients, the stages after it are not run.

    Returns:
        A `Transform`; its state is the tuple of the stages' states.

    Raises:
        TypeError: an argument is no transform; an optimizer comes last, in `fuse`.
        ValueError: a reduction stands behind `accumulate`.

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
        if part.spec.name == "accumulate" and any(later.sums for later in parts[i + 1 :]):
            raise ValueError(
                "chain: a reduction behind accumulate would not know the weight of the window; put it inside: "
                "accumulate(steps, chain(...))"
            )

    def init(params: Tree) -> State:
        return tuple(part.init(params) for part in parts)

    def update(
        grads: Tree, state: State, params: Tree = None, *, weight: Any = None, lane: Any = None,
        carried: Carried | None = None, **extra: Any,
    ) -> tuple[Tree, State]:  # fmt: skip
        if len(state) != len(parts):
            raise ValueError(
                f"this chain has {len(parts)} stages, but the state has {len(state)}; it is another pipeline's state"
            )
        new = list(state)
        for i, part in enumerate(parts):
            there = part_of(carried, i)
            grads, new[i] = part.update(grads, state[i], params, weight=weight, lane=lane, carried=there, **extra)
            if grads is None:
                break
            if part.sums:
                sums = part.sums(new[i])
                weight, lane = sums.total, sums.lane
        return grads, tuple(new)

    reducing = [i for i, part in enumerate(parts) if part.sums]

    def last_sums(state: State) -> Any:
        return parts[reducing[-1]].sums(state[reducing[-1]])  # type: ignore[misc]

    return Transform(
        init,
        update,
        scope=widest(parts),
        sums=last_sums if reducing else None,
        spec=Spec("chain", (("transforms", tuple(parts)),)),
    )


def stages(transform: Transform) -> list[Transform]:
    """The stages of a chain; a transform that is none is its own only stage, identity has none."""
    if transform.spec.name == "chain":
        return list(transform.spec["transforms"])
    if transform.spec.name == "identity":
        return []
    return [transform]


@factory
def identity() -> Transform:
    """Leave the gradients as they are.

    >>> identity().update(torch.tensor(1.0), ())
    (tensor(1.), ())
    """

    def update(grads: Tree, state: State, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        del params, extra
        return grads, state

    return Transform(init_empty, update, scope="element")


@factory
def stateless(function: Callable[..., Any], scope: Scope = "leaf") -> Transform:
    """A transform from a function of one gradient leaf.

    Args:
        function: `grad -> grad`, pure, of the same shape and dtype.
        scope: "leaf", or "element" if each element depends on itself alone.

    Returns:
        A `Transform` without state.

    Raises:
        ValueError: another scope.

    Same as: optax.stateless_with_tree_map.

    >>> stateless(torch.sign).update({"w": torch.tensor([-2.0, 3.0])}, ())
    ({'w': tensor([-1.,  1.])}, ())
    """
    if scope not in ("leaf", "element"):
        raise ValueError(f"scope must be 'leaf' or 'element' for a function of one leaf, got {scope!r}")

    def update(grads: Tree, state: State, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        del params, extra
        return optree.tree_map(function, grads), state

    return Transform(init_empty, update, scope=scope)


def matcher(which: Which) -> Callable[[str], bool]:
    """Whether a path is meant: by a glob pattern, by several, or by a function."""
    if isinstance(which, str):
        return lambda path: fnmatchcase(path, which)
    if callable(which):
        return which
    patterns = tuple(which)
    return lambda path: any(fnmatchcase(path, p) for p in patterns)


def _chosen(which: Which, tree: Tree) -> dict[str, Any]:
    matches = matcher(which)
    return {path: leaf for path, leaf in named_leaves(tree).items() if matches(path)}


def _replace_leaves(tree: Tree, new: Mapping[str, Any]) -> Tree:
    return optree.tree_map_with_path(lambda p, leaf: new.get(path_string(p), leaf), tree)


@factory
def masked(transform: Transform, which: Which) -> Transform:
    """Run a transform on some of the leaves; the others pass unchanged.

    Args:
        transform: What to run; it sees a flat dict path -> leaf of the chosen leaves.
        which: A glob pattern on the path ("*.weight"), several of them, or a function of the path.

    Returns:
        A `Transform`; its state is that of `transform` on the chosen leaves.

    Raises:
        ValueError: at `init`: nothing is chosen; the message lists the paths.

    Same as: optax.masked.

    >>> from fjoin import transforms as tx
    >>> clip = tx.masked(tx.clip_by_value(1.0), "*.weight")
    >>> g = {"a.weight": torch.tensor(3.0), "a.bias": torch.tensor(3.0)}
    >>> clip.update(g, clip.init(g))[0]
    {'a.weight': tensor(1.), 'a.bias': tensor(3.)}
    """
    check_transform(transform, "masked: transform")

    def init(params: Tree) -> State:
        chosen = _chosen(which, params)
        if not chosen and (paths := list(named_leaves(params))):
            raise ValueError(f"{which!r} matches no path; the paths are {paths}")
        return transform.init(chosen)

    def update(grads: Tree, state: State, params: Tree = None, **extra: Any) -> tuple[Tree, State]:
        some = None if params is None else _chosen(which, params)
        new, state = transform.update(_chosen(which, grads), state, some, **extra)
        return _replace_leaves(grads, _not_none(new, "masked")), state

    # No sums: the leaves that it passes by are not the same on all ranks.
    return Transform(init, update, scope=_per_path([transform]))


def _per_path(parts: Sequence[Transform]) -> Scope:
    """The scope of what looks at paths: leaves at least."""
    return "leaf" if widest(parts) in ("element", "leaf") else "tree"


def _not_none(tree: Tree, where: str) -> Tree:
    if tree is None:
        raise ValueError(
            f"accumulate cannot be inside {where}: all parameters must be stepped in the same calls; put accumulate around it"
        )
    return tree


@overload
def partition(parts: Mapping[Patterns, Transform]) -> Transform: ...
@overload
def partition(parts: Mapping[Patterns, Optimizer]) -> Optimizer: ...
@factory
def partition(parts: Mapping[Patterns, Any]) -> Any:
    """Another transform, or another optimizer, for different parameters, by path.

    Weight decay off for biases and norms is one line:

        partition({("*bias", "*norm*"): adamw(lr, weight_decay=0.0), "*": adamw(lr)})

    Args:
        parts: Glob pattern on the path, or a tuple of several -> transforms, or optimizers. The first
            that matches a path wins.

    Returns:
        A `Transform` whose state is the tuple of the parts' states, or an `Optimizer`.

    Raises:
        ValueError: `parts` is empty; at `init`: a path that nothing matches, or a pattern that is
            left without a path. The message lists them.
        TypeError: transforms and optimizers mixed, or something else.

    Same as: optax.partition (multi_transform); torch.optim's param_groups.

    >>> from fjoin import transforms as tx
    >>> opt = tx.partition({"*.bias": tx.sgd(1.0), "*": tx.sgd(0.1)})
    >>> p = {"a.weight": torch.tensor(0.0), "a.bias": torch.tensor(0.0)}
    >>> g = {"a.weight": torch.tensor(1.0), "a.bias": torch.tensor(1.0)}
    >>> opt.step(p, g, opt.init(p))[0]
    {'a.weight': tensor(-0.1000), 'a.bias': tensor(-1.)}
    """
    if not parts:
        raise ValueError("partition needs at least one pattern, for example {'*': transform}")
    if all(isinstance(part, Optimizer) for part in parts.values()):
        return _partition_optimizers(dict(parts))
    for pattern, part in parts.items():
        check_transform(part, f"partition: the part for {pattern!r}")
    return _partition_transforms(dict(parts))


def _label(parts: Mapping[Patterns, Any], path: str) -> Patterns:
    for pattern in parts:
        if matcher(pattern)(path):
            return pattern
    raise ValueError(
        f"no pattern of partition matches {path!r}; the patterns are {list(parts)}; add '*' for all the rest"
    )


def _labelled(parts: Mapping[Patterns, Any], tree: Tree) -> dict[Patterns, dict[str, Any]]:
    out: dict[Patterns, dict[str, Any]] = {pattern: {} for pattern in parts}
    for path, leaf in named_leaves(tree).items():
        out[_label(parts, path)][path] = leaf
    return out


def _all_used(parts: Mapping[Patterns, Any], params: Tree) -> dict[Patterns, dict[str, Any]]:
    labelled = _labelled(parts, params)
    unused = [pattern for pattern, chosen in labelled.items() if not chosen]
    if unused and (paths := list(named_leaves(params))):
        raise ValueError(f"these patterns of partition match no path: {unused}; the paths are {paths}")
    return labelled


def _partition_transforms(parts: dict[Patterns, Transform]) -> Transform:
    def init(params: Tree) -> State:
        return tuple(parts[pattern].init(chosen) for pattern, chosen in _all_used(parts, params).items())

    def update(
        grads: Tree,
        state: State,
        params: Tree = None,
        *,
        lane: Any = None,
        carried: Carried | None = None,
        **extra: Any,
    ) -> tuple[Tree, State]:
        of = None if params is None else _labelled(parts, params)
        new_state, new = list(state), {}
        for i, (pattern, chosen) in enumerate(_labelled(parts, grads).items()):
            out, new_state[i] = parts[pattern].update(
                chosen, state[i], of and of[pattern],
                lane=lane if i == carrier else None, carried=part_of(carried, i), **extra,
            )  # fmt: skip
            new.update(_not_none(out, "partition"))
        return _replace_leaves(grads, new), tuple(new_state)

    # The lane needs to travel once only: with the first part that reduces.
    reducing = [i for i, part in enumerate(parts.values()) if part.sums]
    carrier = reducing[0] if reducing else None
    first = next(iter(parts.values()))
    sums = (lambda state: first.sums(state[0])) if len(reducing) == len(parts) else None  # type: ignore[misc]
    return Transform(init, update, scope=_per_path(list(parts.values())), sums=sums)


def _partition_optimizers(parts: dict[Patterns, Optimizer]) -> Optimizer:
    def by_path(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a partition needs the path of the parameter: use .at(path).step_param, or .init and .step on trees"
        )

    return Optimizer(
        by_path,
        by_path,
        by_path,
        elementwise=all(part.elementwise for part in parts.values()),
        select=lambda path: parts[_label(parts, path)].at(path),
        check=lambda params: _all_used(parts, params),
    )
