"""Collectives that gather, scatter or exchange one piece for each rank."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from .._axis_env import lookup
from .._check import AxisName
from ..tree._tree import Tree
from ._collectives import axis_size
from ._packing import as_tensor, packed
from ._primitive import apply_one, names


def all_gather(x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    """All ranks' values, stacked along a new dimension or, tiled, concatenated along one.

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

    Args:
        x: Leaves with n, the size of the axis, at `dim`; tiled: with a multiple of n there.
        axis: A bound axis name, or a tuple of them.
        dim: The dimension that is divided.
        tiled: Keep the dimension, n times shorter, instead of dropping it.

    Returns:
        The same structure, new tensors: this rank's pieces of the sums.

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

    x = split_ranks("psum_scatter", x, axis, dim, tiled)
    out = packed(x, 1, scatter)
    return optree.tree_map(lambda leaf: leaf.movedim(0, dim), out) if tiled else out


def all_to_all(x: Tree, axis: str, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False) -> Tree:
    """Rank r sends its s-th piece along `split_dim` to rank s.

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

    def place(leaf: Tensor) -> Tensor:
        if not tiled:
            return leaf.movedim(0, concat_dim)
        return torch.cat([piece.movedim(0, split_dim) for piece in leaf.unbind(0)], concat_dim)

    return optree.tree_map(place, x)


def split_ranks(op: str, tree: Tree, axis: AxisName, dim: int, tiled: bool) -> Tree:
    """Bring the ranks' dimension of each leaf to the front: (n, ...), tiled: (n, size / n, ...)."""
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
