"""The collectives by axis name."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ..base import AxisName, Call, Tree, checks
from ._environment import check_late_weight, lookup
from ._primitive import apply_one, as_tensor, names, packed, reduce_over


def psum(x: Tree, axis: AxisName) -> Tree:
    """Sum over the ranks of an axis.

    Args:
        x: A pytree of tensors or numbers, of the same structure, shapes and dtypes on every rank.
        axis: A bound axis name, or a tuple of them.

    Returns:
        The same structure, new tensors, equal on all ranks. Booleans are counted, as int64.

    Raises:
        UnboundAxis: nothing binds the axis.
        TypeError: `axis` is no name, or a leaf has a dtype that does not travel: 16-bit integers, float8; for `pmax`
            and `pmin` complex numbers; or is sparse.
        ValueError: `axis` names an axis twice.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.psum(x, "data"), {"data": 3}, [1.0, 2.0, 3.0])
    [tensor(6.), tensor(6.), tensor(6.)]
    """
    return reduce_over("psum", _counted(x), axis)


def _counted(x: Tree) -> Tree:
    return optree.tree_map(lambda v: t.long() if (t := as_tensor(v)).dtype is torch.bool else t, x)


def pmean(x: Tree, axis: AxisName) -> Tree:
    """Mean over the ranks of an axis: `psum(x) / axis_size`.

    Args, Raises: as `psum`.

    Returns:
        The same structure, new tensors, equal on all ranks, floating-point.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pmean(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor(1.5000), tensor(1.5000)]
    """
    n = axis_size(axis)
    return optree.tree_map(lambda v: v / n, psum(x, axis))


def pmax(x: Tree, axis: AxisName) -> Tree:
    """Elementwise maximum over the ranks of an axis; NaN where any rank has one. No gradient.

    Between processes floats are sent as integers of the same order, with at least 32 bits.

    Args, Raises: as `psum`.

    Returns:
        The same structure, new tensors, equal on all ranks.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pmax(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor(2.), tensor(2.)]
    """
    return reduce_over("pmax", x, axis)


def pmin(x: Tree, axis: AxisName) -> Tree:
    """Elementwise minimum over the ranks of an axis; NaN where any rank has one. No gradient.

    Between processes floats are sent as integers of the same order, with at least 32 bits.

    Args, Raises: as `psum`.

    Returns:
        The same structure, new tensors, equal on all ranks.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pmin(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor(1.), tensor(1.)]
    """
    return reduce_over("pmin", x, axis)


def pbroadcast(x: Tree, axis: str, source: int) -> Tree:
    """The value of rank `source` of the axis, on every rank.

    Args:
        x: A pytree, of the same structure, shapes and dtypes on every rank.
        axis: A bound axis name.
        source: An index in the axis, the same on every rank.

    Returns:
        The same structure, new tensors, equal on all ranks.

    Raises:
        UnboundAxis: nothing binds the axis.
        ValueError: `source` is no rank of the axis.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pbroadcast(x, "data", 1), {"data": 2}, [1.0, 2.0])
    [tensor(2.), tensor(2.)]
    """
    one = lookup(axis)
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < one.size:
        raise ValueError(f"source must be a rank of axis {axis!r}, 0 to {one.size - 1}, got {source!r}")
    return packed(x, 0, lambda v: apply_one("pbroadcast", v, one, source))


def ppermute(x: Tree, axis: str, perm: Sequence[tuple[int, int]]) -> Tree:
    """Send each rank's value along `(source, target)` pairs; a rank that is no target gets zeros.

    With perm = [(0, 1), (1, 2), (2, 3)] on four ranks:

        rank      0        1        2        3
        before    [a a]    [b b]    [c c]    [d d]
        after     [0 0]    [a a]    [b b]    [c c]

    Args:
        x: A pytree, of the same structure, shapes and dtypes on every rank.
        axis: A bound axis name.
        perm: Pairs of indices in the axis, the same on every rank.

    Returns:
        The same structure, new tensors.

    Raises:
        UnboundAxis: nothing binds the axis.
        ValueError: a pair names no rank of the axis, or a source or a target stands twice.

    >>> from fjoin import transforms as tx
    >>> ring = [(0, 1), (1, 2), (2, 0)]
    >>> tx.simulate(lambda x: tx.ppermute(x, "data", ring), {"data": 3}, [1.0, 2.0, 3.0])
    [tensor(3.), tensor(1.), tensor(2.)]
    """
    one = lookup(axis)
    try:
        pairs = tuple([(int(s), int(t)) for s, t in perm])
    except (TypeError, ValueError):
        raise TypeError(f"perm must be pairs (source, target) of ranks, got {perm!r}") from None
    for what, ranks in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"perm names a {what} twice: {pairs}")
        if any(not 0 <= r < one.size for r in ranks):
            raise ValueError(f"perm {pairs} names a {what} outside axis {axis!r}, whose ranks are 0 to {one.size - 1}")
    return packed(x, 0, lambda v: apply_one("ppermute", v, one, pairs))


def axis_index(axis: AxisName) -> Tensor:
    """This rank's index in an axis, 0-d int64 on the host; in a tuple of axes the last one varies fastest.

    Raises:
        UnboundAxis: nothing binds the axis.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda: tx.axis_index(("node", "local")), {"node": 2, "local": 2})
    [tensor(0), tensor(1), tensor(2), tensor(3)]
    """
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for one in [lookup(name) for name in names(axis)]:
        index = index * one.size + one.index()
    return index


def axis_size(axis: AxisName) -> int:
    """The number of ranks of an axis, or of a tuple of axes together: a host integer.

    Raises:
        UnboundAxis: nothing binds the axis.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda: tx.axis_size("data"), {"data": 2})
    [2, 2]
    """
    return math.prod([lookup(name).size for name in names(axis)])  # a list: torch.compile traces no generator


def all_gather(x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    """All ranks' values, stacked along a new dimension or, tiled, concatenated along one.

    On four ranks:

        rank              0                1          2          3
        before            [a]              [b]        [c]        [d]
        after             [[a][b][c][d]]   the same   the same   the same
        after, tiled      [a b c d]        the same   the same   the same

    Args:
        x: A pytree, of the same structure, shapes and dtypes on every rank.
        axis: A bound axis name, or a tuple of them.
        dim: The position of the ranks' dimension; tiled: the dimension that grows.
        tiled: Concatenate instead of stacking.

    Returns:
        Leaves `(..., n, ...)` with n, the size of the axis, at `dim`; tiled: dimension `dim` is n
        times as long. Over a tuple of axes the last one varies fastest.

    Raises:
        UnboundAxis: nothing binds the axis.
        ValueError: `dim` is no dimension of the result.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.all_gather(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor([1., 2.]), tensor([1., 2.])]
    """

    def gather(flat: Tensor) -> Tensor:
        out = flat
        for one in reversed([lookup(name) for name in names(axis)]):
            out = apply_one("all_gather", out, one)
        return out.reshape((axis_size(axis), *flat.shape))

    return place_gathered(packed(x, 0, gather), dim, tiled)


def place_gathered(x: Tree, dim: int, tiled: bool) -> Tree:
    """The result of all_gather from leaves (n, ...), which have one entry for each rank."""
    checks.whole_number("all_gather: dim", dim)
    checks.flag("all_gather: tiled", tiled)

    def place(path: tuple[Any, ...], leaf: Tensor) -> Tensor:
        dims = leaf.dim() - tiled
        if not -dims <= dim < dims:
            raise ValueError(
                f"all_gather: dim is {dim}, but the result for the leaf at {'.'.join(map(str, path))!r} has {dims} dimensions"
            )
        return torch.cat(leaf.unbind(0), dim) if tiled else leaf.movedim(0, dim)

    return optree.tree_map_with_path(place, x)


def psum_scatter(x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    """The sum over the ranks; rank r keeps only its r-th piece along `dim`.

    On four ranks, each with four values:

        rank              0                1                2                3
        before            [a0 a1 a2 a3]    [b0 b1 b2 b3]    [c0 c1 c2 c3]    [d0 d1 d2 d3]
        after             a0+b0+c0+d0      a1+b1+c1+d1      a2+b2+c2+d2      a3+b3+c3+d3
        after, tiled      [a0+b0+c0+d0]    [a1+b1+c1+d1]    [a2+b2+c2+d2]    [a3+b3+c3+d3]

    Args:
        x: Leaves with n, the size of the axis, at `dim`; tiled: with a multiple of n there.
        axis: A bound axis name, or a tuple of them.
        dim: The dimension that is divided.
        tiled: Keep the dimension, n times shorter, instead of dropping it.

    Returns:
        The same structure, new tensors: this rank's pieces of the sums. Booleans are counted, as int64.

    Raises:
        UnboundAxis: nothing binds the axis.
        ValueError: the dimension does not divide, with the path.

    >>> from fjoin import transforms as tx
    >>> x = torch.tensor([1.0, 2.0])
    >>> tx.simulate(lambda x: tx.psum_scatter(x, "data"), {"data": 2}, [x, x])
    [tensor(2.), tensor(4.)]
    """
    axes = [lookup(name) for name in names(axis)]

    def scatter(flat: Tensor) -> Tensor:
        out = flat.reshape((*[one.size for one in axes], flat.shape[-1]))
        for one in axes:
            out = apply_one("psum_scatter", out, one)
        return out

    x = split_ranks("psum_scatter", _counted(x), axis, dim, tiled)
    out = packed(x, 1, scatter)
    return optree.tree_map(lambda leaf: leaf.movedim(0, dim), out) if tiled else out


def all_to_all(x: Tree, axis: str, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False) -> Tree:
    """Rank r sends its s-th piece along `split_dim` to rank s.

    On four ranks, each with four values:

        rank      0                1                2                3
        before    [a0 a1 a2 a3]    [b0 b1 b2 b3]    [c0 c1 c2 c3]    [d0 d1 d2 d3]
        after     [a0 b0 c0 d0]    [a1 b1 c1 d1]    [a2 b2 c2 d2]    [a3 b3 c3 d3]

    Args:
        x: Leaves with n, the size of the axis, at `split_dim`; tiled: with a multiple of n there.
        axis: A bound axis name.
        split_dim: The dimension that is divided among the receivers.
        concat_dim: The dimension of the received pieces, in the order of the senders.
        tiled: Concatenate the pieces along `concat_dim` instead of stacking them.

    Returns:
        The same structure, new tensors: the pieces received.

    Raises:
        UnboundAxis: nothing binds the axis.
        ValueError: the dimension does not divide, with the path.

    >>> from fjoin import transforms as tx
    >>> xs = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    >>> tx.simulate(lambda x: tx.all_to_all(x, "data"), {"data": 2}, xs)
    [tensor([1, 3]), tensor([2, 4])]
    """
    one = lookup(axis)
    x = split_ranks("all_to_all", x, axis, split_dim, tiled)
    return place_received(packed(x, 1, lambda v: apply_one("all_to_all", v, one)), split_dim, concat_dim, tiled)


def place_received(x: Tree, split_dim: int, concat_dim: int, tiled: bool) -> Tree:
    """The result of all_to_all from leaves (n, ...), which have one piece from each rank."""
    checks.whole_number("all_to_all: concat_dim", concat_dim)

    def place(leaf: Tensor) -> Tensor:
        if not tiled:
            return leaf.movedim(0, concat_dim)
        return torch.cat([piece.movedim(0, split_dim) for piece in leaf.unbind(0)], concat_dim)

    return optree.tree_map(place, x)


def split_ranks(op: str, tree: Tree, axis: AxisName, dim: int, tiled: bool) -> Tree:
    """Bring the ranks' dimension of each leaf to the front: (n, ...), tiled: (n, size / n, ...)."""
    checks.whole_number(f"{op}: the dim to divide", dim)
    checks.flag(f"{op}: tiled", tiled)
    n = axis_size(axis)

    def split(path: tuple[Any, ...], leaf: Any) -> Tensor:
        x = as_tensor(leaf)
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else None
        if size is None or (size % n if tiled else size != n):
            want = f"a multiple of {n}" if tiled else str(n)
            raise ValueError(
                f"{op}: the leaf at {'.'.join(map(str, path))!r} has shape {tuple(x.shape)}; its dimension {dim} "
                f"must have size {want}, the size of axis {axis!r}"
            )
        x = x.movedim(dim, 0)
        return x.reshape(n, size // n, *x.shape[1:]) if tiled else x

    return optree.tree_map_with_path(split, tree)


def all_to_all_single(
    x: Tree,
    axis: str,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
) -> Tree:
    """`all_to_all` along the first dimension, with a different number of rows for each rank.

    On four ranks, if rank 0 gives (1, 2, 0, 1) rows, and the others give one row to rank 0 and nothing else:

        rank                  0                1               2               3
        before                [a0 a1 a2 a3]    [b]             [c]             [d]
        after                 [a0 b c d]       [a1 a2]         []              [a3]
        output_split_sizes    (1, 1, 1, 1)     (2, 0, 0, 0)    (0, 0, 0, 0)    (1, 0, 0, 0)

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


def from_one(tree: Tree, is_source: Tensor, axis: AxisName) -> Tree:
    """The tree of the one rank whose `is_source`, 0-d bool, is set; zeros if there is none. It sends one message."""
    # The bytes of all other ranks are 0, so the sum of the bytes is exact, for -0.0 and NaN too.
    sent = optree.tree_map(lambda leaf: torch.where(is_source, _bytes(leaf), torch.zeros_like(_bytes(leaf))), tree)
    return optree.tree_map(lambda raw, leaf: raw.clone().view(leaf.dtype).reshape(leaf.shape), psum(sent, axis), tree)


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)


# A call asks for the sums of weights; its room lies below this one.
Call.psum, Call.axis_size = staticmethod(psum), staticmethod(axis_size)
Call.check_late_weight = staticmethod(check_late_weight)
