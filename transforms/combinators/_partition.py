"""Transforms of some of the leaves, by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, overload

import torch

from ..base import Call, Compression, Facts, Needs, State, Transform, Tree, check_transform, devices, factory, trees
from ..optimizers import Optimizer

Patterns: TypeAlias = str | tuple[str, ...]
Which: TypeAlias = str | Sequence[str] | Callable[[str], bool]


def check_which(name: str, which: Any, functions: bool = True) -> None:
    """Raise unless `which` is a pattern, several patterns, or, with `functions`, a function of a path.

    Raises:
        TypeError: none of these.
        ValueError: no pattern at all.
    """
    if isinstance(which, str) or (functions and callable(which)):
        return
    if not isinstance(which, (tuple, list)) or not all(isinstance(pattern, str) for pattern in which):
        other = ", or a function of a path" if functions else ""
        raise TypeError(f"{name} must be a glob pattern such as '*.bias', a tuple of them{other}, got {which!r}")
    if not which:
        raise ValueError(f"{name} is empty, so that it matches nothing, got {which!r}")


def matcher(which: Which) -> Callable[[str], bool]:
    """A function path -> bool: whether the path matches a glob pattern, one of several, or a function."""
    if isinstance(which, str):
        return lambda path: _matches(path, which)
    if callable(which):
        return which
    patterns = tuple(which)
    return lambda path: any([_matches(path, p) for p in patterns])


@devices.constant  # Dynamo cannot trace fnmatch
def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern)


def _chosen(which: Which, tree: Tree) -> dict[str, Any]:
    matches = matcher(which)
    return {path: leaf for path, leaf in trees.named_leaves(tree).items() if matches(path)}


def replace_leaves(tree: Tree, new: Mapping[str, Any]) -> Tree:
    return trees.map_with_path(lambda path, leaf: new.get(path, leaf), tree)


@factory
def masked(transform: Transform, which: Which) -> Transform:
    """Runs a transform on some of the leaves; the others pass unchanged.

    Args:
        transform: The transform; it gets a flat dict path -> leaf of the chosen leaves.
        which: A glob pattern for paths ("*.weight"), several patterns, or a function of the path.

    Returns:
        A `Transform`; its state is that of `transform` on the chosen leaves.

    Raises:
        ValueError: at `init`: nothing is chosen; the message lists the paths. At `update`: `accumulate` inside.
        TypeError: `transform` is not a Transform; `which` is no pattern.

    Same as: optax.masked.

    >>> from fjoin import transforms as tx
    >>> clip = tx.masked(tx.clip_by_value(1.0), "*.weight")
    >>> g = {"a.weight": torch.tensor(3.0), "a.bias": torch.tensor(3.0)}
    >>> clip.update(g, clip.init(g))[0]
    {'a.weight': tensor(1.), 'a.bias': tensor(3.)}
    """
    check_which("masked: which", which)

    def init(params: Tree) -> State:
        chosen = _chosen(which, params)
        if not chosen and (paths := list(trees.named_leaves(params))):
            raise ValueError(f"{which!r} matches no path; the paths are {paths}")
        return transform.init(chosen)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        some = None if params is None else _chosen(which, params)
        with trees.default_device_of(grads):
            new, state = transform.run(_chosen(which, grads), state, some, call)
        return replace_leaves(grads, _not_none(new, "masked")), state

    # `wraps` is not set: the leaves that are not chosen differ between ranks.
    lossy = transform.facts.compression
    if lossy and (paths := lossy.paths):
        lossy = lossy._replace(paths=lambda params: paths(_chosen(which, params)))
    return Transform(init, update, Needs.LEAVES | Needs.PATHS, facts=Facts(compression=lossy))


def _not_none(tree: Tree, where: str) -> Tree:
    if tree is None:
        raise ValueError(f"accumulate inside {where} would step some parameters only; put accumulate around it")
    return tree


@overload
def partition(parts: Mapping[Patterns, Transform]) -> Transform: ...
@overload
def partition(parts: Mapping[Patterns, Optimizer]) -> Optimizer: ...
@factory
def partition(parts: Mapping[Patterns, Any]) -> Any:
    """Applies different transforms, or different optimizers, to different parameters, chosen by path.

    Weight decay off for biases and norms is one line:

        partition({("*bias", "*norm*"): adamw(lr, weight_decay=0.0), "*": adamw(lr)})

    Args:
        parts: A glob pattern for paths, or a tuple of several -> a transform, or an optimizer. The first match wins.

    Returns:
        A `Transform` whose state is the tuple of the parts' states, or an `Optimizer`.

    Raises:
        ValueError: `parts` is empty; at `init`: a path without a matching pattern, or a pattern without a path. The
            message lists them. At `update`: `accumulate` inside.
        TypeError: transforms and optimizers mixed, or another type.

    Same as: optax.partition (multi_transform); torch.optim's param_groups.

    >>> from fjoin import transforms as tx
    >>> opt = tx.partition({"*.bias": tx.sgd(1.0), "*": tx.sgd(0.1)})
    >>> p = {"a.weight": torch.tensor(0.0), "a.bias": torch.tensor(0.0)}
    >>> g = {"a.weight": torch.tensor(1.0), "a.bias": torch.tensor(1.0)}
    >>> opt.step(p, g, opt.init(p))[0]
    {'a.weight': tensor(-0.1000), 'a.bias': tensor(-1.)}
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f"partition takes a mapping from patterns to transforms or optimizers, got {parts!r}")
    for pattern in parts:
        if not isinstance(pattern, str):
            check_which("partition: a pattern", pattern, functions=False)
    if not parts:
        raise ValueError("partition needs at least one pattern, for example {'*': transform}")
    if all(isinstance(part, Optimizer) for part in parts.values()):
        return _partition_optimizers(dict(parts))
    for pattern, part in parts.items():
        check_transform(part, f"partition: the part for {pattern!r}")
    return _partition_transforms(dict(parts))


def label_of(parts: Mapping[Patterns, Any], path: str) -> Patterns:
    for pattern in parts:
        if matcher(pattern)(path):
            return pattern
    raise ValueError(f"no pattern of partition matches {path!r}; the patterns are {list(parts)}; add '*' for the rest")


def _labelled(parts: Mapping[Patterns, Any], tree: Tree) -> dict[Patterns, dict[str, Any]]:
    out: dict[Patterns, dict[str, Any]] = {pattern: {} for pattern in parts}
    for path, leaf in trees.named_leaves(tree).items():
        out[label_of(parts, path)][path] = leaf
    return out


def _all_used(parts: Mapping[Patterns, Any], params: Tree) -> dict[Patterns, dict[str, Any]]:
    labelled = _labelled(parts, params)
    unused = [pattern for pattern, chosen in labelled.items() if not chosen]
    if unused and (paths := list(trees.named_leaves(params))):
        raise ValueError(f"these patterns of partition match no path: {unused}; the paths are {paths}")
    return labelled


def _run_parts(
    where: str, parts: Sequence[Transform], split: Callable[[Tree], Sequence[dict[str, Any]]]
) -> Callable[[Tree, State, Tree, Call], tuple[Tree, State]]:
    """The update of transforms each of which gets some of the leaves by path, as `split` says."""

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        if len(state) != len(parts):
            raise ValueError(
                f"this {where} has {len(parts)} parts, but the state has {len(state)}; it is another pipeline's state"
            )
        new, states = {}, []
        of = [None] * len(parts) if params is None else split(params)
        for part, some, own, known in zip(parts, split(grads), state, of, strict=True):
            with trees.default_device_of(grads):
                out, after = part.run(some, own, known, call)
            new.update(_not_none(out, where))
            states.append(after)
        return replace_leaves(grads, new), tuple(states)

    return update


def _partition_transforms(parts: dict[Patterns, Transform]) -> Transform:
    def init(params: Tree) -> State:
        return tuple(parts[pattern].init(chosen) for pattern, chosen in _all_used(parts, params).items())

    lossy = {pattern: part.facts.compression for pattern, part in parts.items() if part.facts.compression}
    functions = {pattern: one.paths for pattern, one in lossy.items() if one.paths}

    def paths(params: Tree) -> set[str]:
        chosen = _labelled(parts, params)
        return {path for pattern, function in functions.items() for path in function(chosen[pattern])}

    encoded = any(one.encoded for one in lossy.values())
    compression = Compression(paths if functions else None, encoded) if lossy else None
    update = _run_parts("partition", list(parts.values()), lambda tree: list(_labelled(parts, tree).values()))
    needs = Needs.LEAVES | Needs.PATHS
    return Transform(init, update, needs, facts=Facts(compression=compression, takes=("donated",), wraps="parts"))


def _partition_optimizers(parts: dict[Patterns, Optimizer]) -> Optimizer:
    def by_path(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("a partition needs the path of the parameter: use .at(path).step_param, or .step on trees")

    def check(params: Tree) -> None:
        for pattern, chosen in _all_used(parts, params).items():
            if parts[pattern].check:
                parts[pattern].check(chosen)  # type: ignore[misc]

    return Optimizer(
        by_path,
        by_path,
        by_path,
        elementwise=all(part.elementwise for part in parts.values()),
        select=lambda path: parts[label_of(parts, path)].at(path),
        check=check,
    )


@factory
def in_fragments(*parts: Transform) -> Transform:
    """Splits the leaves, in the order of their paths, into as many groups as there are parts, and runs one on each.

    The groups have nearly equal numbers of leaves, and one at least.

    Args:
        parts: The transforms.

    Returns:
        A `Transform`; its state is the tuple of the parts' states.

    Raises:
        ValueError: at `init` and `update`: fewer leaves than parts.
        TypeError: a part is no transform.

    >>> from fjoin import transforms as tx
    >>> two = in_fragments(tx.identity(), tx.stateless(torch.neg))
    >>> p = {"a": torch.ones(3), "b": torch.ones(1), "c": torch.ones(1)}
    >>> two.update(p, two.init(p))[0]
    {'a': tensor([1., 1., 1.]), 'b': tensor([-1.]), 'c': tensor([-1.])}
    """

    def init(params: Tree) -> State:
        return tuple(part.init(some) for part, some in zip(parts, fragments(params, len(parts)), strict=True))

    update = _run_parts("diloco", parts, lambda tree: fragments(tree, len(parts)))
    return Transform(init, update, Needs.LEAVES | Needs.PATHS | Needs.TREE)


def fragments(tree: Tree, count: int) -> list[dict[str, torch.Tensor]]:
    """The leaves by path in `count` groups of neighbours, of nearly equal numbers of leaves.

    Raises:
        ValueError: fewer leaves than groups.
    """
    leaves = list(trees.named_leaves(tree).items())
    if count > len(leaves):
        raise ValueError(
            f"{count} fragments need as many parameters, got {len(leaves)}: {[path for path, _ in leaves]}"
        )
    return [dict(leaves[i * len(leaves) // count : (i + 1) * len(leaves) // count]) for i in range(count)]
