"""An all_to_all of pieces of different lengths."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import optree

from .._axis_env import lookup
from ..tree._tree import Tree
from ._gather_scatter import all_to_all
from ._packing import as_tensor, packed
from ._primitive import apply_one


def all_to_all_single(
    x: Tree,
    axis: str,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
) -> Tree:
    """`all_to_all` along the first dimension, with a different number of rows for each rank.

    Args:
        x: A pytree; the first dimension of every leaf is divided, in the same way.
        axis: A bound axis name.
        input_split_sizes: The number of rows for each rank, host integers. None, for both sizes: equal parts for all
            ranks.
        output_split_sizes: The number of rows from each rank: entry s on rank r is entry r of `input_split_sizes` on
            rank s.

    Returns:
        The same structure, new tensors: the rows received, in the order of the senders, `sum(output_split_sizes)` of
        them.

    Raises:
        ValueError: the sizes are not one for each rank, do not add up to a leaf's first dimension, or differ in what
            this rank keeps; only one of them is given.
        CollectiveMismatch: in the simulator, a rank sends more or less than the other expects. Real ranks cannot know.

    Same as: torch.distributed's function of this name, jax.lax.ragged_all_to_all without its offsets.

    >>> from fjoin import transforms as tx
    >>> def one_rank(x, give, take):
    ...     return tx.all_to_all_single(x, "data", input_split_sizes=give, output_split_sizes=take)
    >>> xs = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    >>> tx.simulate(one_rank, {"data": 2}, xs, [(1, 2), (0, 2)], [(1, 0), (2, 2)])
    [tensor([1]), tensor([2, 3, 4, 5])]
    """
    if input_split_sizes is None and output_split_sizes is None:
        return all_to_all(x, axis, tiled=True)
    one = lookup(axis)
    give, take = check_splits(x, axis, input_split_sizes, output_split_sizes)
    return packed(x, 1, lambda rows: apply_one("all_to_all_single", rows, one, (give, take)))


def check_splits(x: Tree, axis: str, given: Any, taken: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of rows to and from each rank.

    Raises:
        ValueError: see `all_to_all_single`.
    """
    one = lookup(axis)
    sizes = []
    for name, value in (("input_split_sizes", given), ("output_split_sizes", taken)):
        try:
            whole = tuple(operator.index(n) for n in value)
        except TypeError:
            whole = ()
        if len(whole) != one.size or min(whole) < 0:
            raise ValueError(
                f"all_to_all_single: {name} must be a whole number, at least 0, for each of the {one.size} ranks of axis "
                f"{axis!r}, got {value!r}; pass both sizes, or none"
            )
        sizes.append(whole)
    give, take = sizes
    me = int(one.index())
    if give[me] != take[me]:
        raise ValueError(
            f"all_to_all_single: rank {me} of axis {axis!r} sends itself {give[me]} rows, but takes {take[me]}; "
            f"input_split_sizes is {give}, output_split_sizes is {take}"
        )

    def check(path: tuple[Any, ...], leaf: Any) -> None:
        shape = tuple(as_tensor(leaf).shape)
        if not shape or shape[0] != sum(give):
            raise ValueError(
                f"all_to_all_single: the leaf at {'.'.join(map(str, path))!r} has shape {shape}; its first dimension must be "
                f"{sum(give)}, the sum of input_split_sizes {give}"
            )

    optree.tree_map_with_path(check, x)
    return give, take
