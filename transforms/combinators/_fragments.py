"""Different transforms for consecutive groups of leaves, of about the same size."""

from __future__ import annotations

import torch

from ..spec._spec import factory
from ..transform._call import Call
from ..transform._transform import Needs, Transform, check_transform
from ..tree._tree import State, Tree, default_device_of, named_leaves
from ._partition import replace_leaves


@factory
def in_fragments(*parts: Transform) -> Transform:
    """Splits the leaves, in the order of their paths, into as many groups as there are parts, and runs one on each.

    The largest group is as small as groups of neighbours allow. Each group has a leaf at least.

    Args:
        parts: The transforms; none of them carries the lane.

    Returns:
        A `Transform`; its state is the tuple of the parts' states.

    Raises:
        ValueError: no part; at `init` and `update`: fewer leaves than parts.
        TypeError: a part is no transform.

    >>> from fjoin import transforms as tx
    >>> two = in_fragments(tx.identity(), tx.stateless(torch.neg))
    >>> p = {"a": torch.ones(3), "b": torch.ones(1), "c": torch.ones(1)}
    >>> two.update(p, two.init(p))[0]
    {'a': tensor([1., 1., 1.]), 'b': tensor([-1.]), 'c': tensor([-1.])}
    """
    if not parts:
        raise ValueError("in_fragments needs at least one transform")
    for i, part in enumerate(parts):
        check_transform(part, f"in_fragments: argument {i}")

    def init(params: Tree) -> State:
        return tuple(part.init(some) for part, some in zip(parts, fragments(params, len(parts)), strict=True))

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        new, states = {}, list(state)
        leaves = None if params is None else named_leaves(params)
        call = call.inside(lane=None)
        for i, (part, some) in enumerate(zip(parts, fragments(grads, len(parts)), strict=True)):
            of = None if leaves is None else {path: leaves[path] for path in some}
            with default_device_of(grads):
                out, states[i] = part.run(some, state[i], of, call)
            new.update(out)
        return replace_leaves(grads, new), tuple(states)

    needs = Needs.LEAVES | Needs.PATHS | Needs.TREE
    return Transform(init, update, needs)


def fragments(tree: Tree, count: int) -> list[dict[str, torch.Tensor]]:
    """The leaves by path in `count` groups of neighbours, whose largest is as small as possible.

    Raises:
        ValueError: fewer leaves than groups.
    """
    leaves = named_leaves(tree)
    if count > len(leaves):
        raise ValueError(f"{count} fragments need as many parameters, got {len(leaves)}: {list(leaves)}")
    sizes = {path: leaf.numel() for path, leaf in leaves.items()}
    low, high = max(sizes.values()), sum(sizes.values())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_groups(sizes, middle)) <= count else (middle + 1, high)
    groups = _groups(sizes, low)
    while len(groups) < count:  # split a group; no group gets larger
        i = max((i for i, group in enumerate(groups) if len(group) > 1), key=lambda i: sum(sizes[p] for p in groups[i]))
        groups[i : i + 1] = groups[i][: len(groups[i]) // 2], groups[i][len(groups[i]) // 2 :]
    return [{path: leaves[path] for path in group} for group in groups]


def _groups(sizes: dict[str, int], most: int) -> list[list[str]]:
    """The fewest groups of neighbours of at most this size each."""
    groups: list[list[str]] = []
    room = -1
    for path, size in sizes.items():
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(path)
        room -= size
    return groups
