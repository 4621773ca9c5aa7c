"""A function of global tensors, run on simulated ranks that each hold a part of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from ..._check import axis_names
from ..._foreign import remedy
from ...tree._tree import path_string
from .._packing import as_tensor
from ._grid import Grid
from ._simulate import checked_axes, simulate

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class P:
    """How a tensor is divided: for each dimension an axis, a tuple of axes, or None; dimensions that are left out are whole.

    Over a tuple of axes the last one varies fastest. `P()` is the same tensor on all ranks.

    Args:
        parts: Of each dimension the axes over which it is divided.

    Raises:
        TypeError: a part is neither a name, nor a tuple of names, nor None.
        ValueError: an axis is named twice.

    Same as: jax.sharding.PartitionSpec.

    >>> P("x", None, ("y", "z"))
    P('x', None, ('y', 'z'))
    """

    parts: tuple[tuple[str, ...], ...]

    def __init__(self, *parts: str | tuple[str, ...] | None) -> None:
        self.parts = tuple(() if part is None else axis_names(part) for part in parts)
        axis_names(self.axes)  # raises for one that is named twice

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which some dimension is divided."""
        return tuple(itertools.chain(*self.parts))

    def __repr__(self) -> str:
        return f"P({', '.join(repr(part[0] if len(part) == 1 else part or None) for part in self.parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


def shard_map(
    f: Callable[..., Any],
    axes: Mapping[str, int],
    in_specs: Any,
    out_specs: Any,
    *,
    engine: Literal["lockstep", "vmap"] = "lockstep",
) -> Callable[..., Any]:
    """`f` as a function of global tensors: each simulated rank gets its parts of them, and the results are put together.

    Args:
        f: The function that every rank runs; it may call collectives over `axes`, and differentiate inside.
        axes: Axis name -> number of ranks, as in `simulate`.
        in_specs: A `P` for each argument, or for each leaf of it, in a tuple: a tree prefix of the arguments. One `P` serves all.
        out_specs: The same for what `f` returns.
        engine: As in `simulate`.

    Returns:
        A function of pytrees of tensors or numbers. Each rank gets copies of its parts, of the same dtypes. In the results, new tensors
        of the dtypes that `f` returns, dimensions that a spec divides have been concatenated, so they are longer by the number of ranks.

    Raises:
        TypeError: `f` is no function, or a spec is no `P`; raised by the call: a leaf that is no tensor or number.
        ValueError: a spec names an unknown axis; raised by the call: specs that do not fit the arguments or results, a dimension that does
            not divide, results of several shapes or dtypes, or one whose bits differ between ranks along an axis that its
            spec does not name. Any two NaNs are equal.
        CollectiveMismatch, NotVmappable: raised by the call: as `simulate`.

    Same as: jax.shard_map, on a mesh of simulated ranks.

    >>> from fjoin import transforms as tx
    >>> total = tx.shard_map(lambda x: tx.psum(x.sum(), "data"), {"data": 4}, tx.P("data"), tx.P())
    >>> total(torch.arange(8.0))
    tensor(28.)
    """
    if not callable(f):
        raise TypeError(f"shard_map takes a function, got {f!r}")
    grid = Grid(checked_axes(axes, engine))
    ranks = range(math.prod(grid.sizes.values()))
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        _check_specs(name, specs, grid.sizes)

    def mapped(*args: Any) -> Any:
        given: Any = args
        paths, found, structure = optree.tree_flatten_with_path(given)
        specs = _spread("in_specs", in_specs, "the arguments", given)
        names = [f"the argument {path_string(path)!r}" for path in paths]
        leaves = [_tensor(name, leaf) for name, leaf in zip(names, found, strict=True)]
        cuts = [_cut(name, leaf, spec, grid) for name, leaf, spec in zip(names, leaves, specs, strict=True)]
        rows = [optree.tree_unflatten(structure, [cut[rank] for cut in cuts]) for rank in ranks]
        results = simulate(lambda row: f(*row), grid.sizes, rows, engine=engine)
        paths, _, structure = optree.tree_flatten_with_path(results[0])
        for rank, other in enumerate(results):
            if optree.tree_structure(other) != structure:
                raise ValueError(
                    f"ranks 0 and {rank} return different structures: {structure} and {optree.tree_structure(other)}"
                )
        specs = _spread("out_specs", out_specs, "the results", results[0])
        columns = zip(*map(optree.tree_leaves, results), strict=True)
        names = [f"the result {path_string(path)!r}" if path else "the result" for path in paths]
        joined = [_join(*each, grid) for each in zip(names, columns, specs, strict=True)]
        return optree.tree_unflatten(structure, joined)

    return mapped


def _check_specs(name: str, specs: Any, sizes: Mapping[str, int]) -> None:
    for spec in optree.tree_leaves(specs):
        if not isinstance(spec, P):
            raise TypeError(f"{name} holds tx.P(...) for each argument, result or leaf, got {spec!r}")
        if unknown := [axis for axis in spec.axes if axis not in sizes]:
            raise ValueError(f"{name}: {spec!r} names {unknown[0]!r}, which is no axis of {dict(sizes)!r}")


def _spread(name: str, specs: Any, of_name: str, tree: Any) -> list[P]:
    """The spec of each leaf."""
    try:
        return optree.broadcast_prefix(specs, tree)
    except ValueError as error:
        raise ValueError(f"{name} is no tree prefix of {of_name}, {optree.tree_structure(tree)}: {error}") from None


def _tensor(name: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, (Tensor, bool, int, float, complex)):
        raise TypeError(
            f"{name} is {leaf!r}, a {type(leaf).__name__}; shard_map takes tensors and numbers{remedy(leaf)}"
        )
    return as_tensor(leaf)


def _check_dims(name: str, x: Tensor, spec: P) -> None:
    if len(spec.parts) > x.dim():
        raise ValueError(f"{name} has shape {tuple(x.shape)}, fewer dimensions than its spec {spec!r}")


def _cut(name: str, x: Tensor, spec: P, grid: Grid) -> list[Tensor]:
    """The part of each rank."""
    _check_dims(name, x, spec)
    parts = [x] * math.prod(grid.sizes.values())
    for dim, over in enumerate(spec.parts):
        count = math.prod(grid.sizes[axis] for axis in over)
        if x.shape[dim] % count:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; its dimension {dim} must be a multiple of {count}, the ranks of {over!r}"
            )
        size, each = x.shape[dim] // count, Grid({axis: grid.sizes[axis] for axis in over})
        places = [each.rank(grid.place(rank, over)) for rank in range(len(parts))]
        parts = [part.narrow(dim, place * size, size) for part, place in zip(parts, places, strict=True)]
    return [part.clone() for part in parts]


def _join(name: str, column: Sequence[Any], spec: P, grid: Grid) -> Tensor:
    """The global tensor from those of all ranks."""
    leaves = [_tensor(f"{name} of rank {rank}", leaf) for rank, leaf in enumerate(column)]
    _check_dims(name, leaves[0], spec)
    rest = [axis for axis in grid.sizes if axis not in spec.axes]
    for rank, leaf in enumerate(leaves):
        if (leaf.shape, leaf.dtype) != (leaves[0].shape, leaves[0].dtype):
            forms = [f"{x.dtype}{list(x.shape)}" for x in (leaves[0], leaf)]
            raise ValueError(f"{name} is {forms[0]} on rank 0 and {forms[1]} on rank {rank}; all must be alike")
        first = grid.rank(grid.place(rank) | dict.fromkeys(rest, 0))
        if not _same(leaves[first], leaf):
            raise ValueError(
                f"{name} differs between ranks {first} and {rank}, but its spec {spec!r} does not name {rest!r}; name the axis, "
                f"or make the ranks equal by psum, pmean or all_gather"
            )

    def from_dim(dim: int, place: dict[str, int]) -> Tensor:
        if dim == len(spec.parts):
            return leaves[grid.rank(place)]
        over = spec.parts[dim]
        every = itertools.product(*(range(grid.sizes[axis]) for axis in over))
        parts = [from_dim(dim + 1, place | dict(zip(over, at, strict=True))) for at in every]
        return torch.cat(parts, dim) if over else parts[0]

    return from_dim(0, dict.fromkeys(grid.sizes, 0))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether the bits are the same, where any two NaNs are."""
    a, b = (torch.view_as_real(x.detach()) if x.is_complex() else x.detach() for x in (a, b))
    equal = a.view(_WORDS[a.element_size()]) == b.view(_WORDS[b.element_size()])
    return bool((equal | (a.isnan() & b.isnan())).all())
