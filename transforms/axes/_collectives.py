"""Collectives by axis name, with JAX's names and meaning, on pytrees.

One call on a pytree is one message per dtype: the leaves travel packed. All of them are
differentiable (the derivative is that of the sum of all ranks' outputs, so the transpose of
psum is psum) and go through torch.func.grad, torch.func.vmap over other things, and
torch.compile.

Same as: jax.lax's parallel operators; torch.distributed's collectives, without process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from .._tree import Tree
from ._env import Axis, lookup

AxisName: TypeAlias = str | tuple[str, ...]

_TRANSPOSE = {
    "psum": "psum",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "psum",
}
# Where the ranks' dimension of a vmapped result is: None says that all ranks have the same.
_OUT_DIM = {"psum_scatter": 0, "all_to_all": 0, "ppermute": 0}


class _Collective(torch.autograd.Function):
    """One collective on one tensor, over one axis.

    The token decides whose vmap this is: it is batched only at the level that is the axis.
    """

    @staticmethod
    def forward(x: Tensor, token: Tensor | None, op: str, arg: Any, axis: Axis) -> Tensor:
        return axis.run(op, x, arg)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The axis is kept here, since backward may run in a thread where nothing is bound.
        _, _, ctx.op, ctx.arg, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        op, arg, axis = ctx.op, ctx.arg, ctx.axis
        if op not in _TRANSPOSE:
            raise TypeError(f"{op} has no gradient; detach its input, or use psum or all_gather")
        if op == "ppermute":
            arg = tuple((target, source) for source, target in arg)
        out = _Collective.apply(grad, axis.token, _TRANSPOSE[op], arg, axis)
        if op == "pbroadcast":
            out = torch.where(axis.index() == ctx.arg, out, torch.zeros_like(out))
        return out, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, token: Tensor | None, op: str, arg: Any, axis: Axis
    ) -> tuple[Tensor, int | None]:
        x_dim, token_dim = in_dims[:2]
        if token_dim is None:  # somebody else's vmap: carry its dimension along, at the end
            out = _Collective.apply(x.movedim(x_dim, -1), token, op, arg, axis)
            return out, out.dim() - 1
        n = info.batch_size
        x = x.expand(n, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        return _stacked(op, x, arg, n), _OUT_DIM.get(op)


def _stacked(op: str, x: Tensor, arg: Any, n: int) -> Tensor:
    """The collective in plain tensor operations: `x[r]` is rank r's input."""
    if op in ("psum", "psum_scatter"):
        return x.sum(0, dtype=x.dtype)
    if op == "pmax":
        return x.amax(0)
    if op == "pmin":
        return x.amin(0)
    if op == "pbroadcast":
        return x[arg]
    if op == "all_gather":
        return x
    if op == "all_to_all":
        return x.transpose(0, 1)
    source = {target: s for s, target in arg}
    out = x[torch.tensor([source.get(r, 0) for r in range(n)])]
    if len(source) == n:
        return out
    kept = torch.tensor([r in source for r in range(n)]).view(n, *[1] * (x.dim() - 1))
    return torch.where(kept, out, torch.zeros_like(out))


def names(axis: AxisName) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def _as_tensor(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)


def _packed(tree: Tree, lead: int, run: Callable[[Tensor], Tensor]) -> Tree:
    """Apply `run` to the leaves, one call per dtype and device.

    The leaves are packed behind their first `lead` dimensions; `run` may change how many leading
    dimensions there are, not the packed one.
    """
    leaves, structure = optree.tree_flatten(tree)
    leaves = [_as_tensor(leaf) for leaf in leaves]
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(i)
    out: list[Any] = [None] * len(leaves)
    for members in groups.values():
        if len(members) == 1:
            (i,) = members
            flat = leaves[i].reshape((*leaves[i].shape[:lead], math.prod(leaves[i].shape[lead:])))
        else:
            flat = torch.cat([leaves[i].reshape((*leaves[i].shape[:lead], math.prod(leaves[i].shape[lead:]))) for i in members], dim=-1)
        result = run(flat)
        sizes = [math.prod(leaves[i].shape[lead:]) for i in members]
        for i, piece in zip(members, result.split(sizes, dim=-1), strict=True):
            out[i] = piece.reshape((*result.shape[:-1], *leaves[i].shape[lead:]))
    return optree.tree_unflatten(structure, out)


def _apply(op: str, x: Tensor, axis: Axis, arg: Any = None) -> Tensor:
    return _Collective.apply(x, axis.token, op, arg, axis)  # type: ignore[no-any-return]


def _reduce(op: str, tree: Tree, axis: AxisName, arg: Any = None) -> Tree:
    for one in _lookup_all(axis):
        tree = _packed(tree, 0, lambda x, one=one: _apply(op, x, one, arg))  # type: ignore[misc]
    return tree


def _lookup_all(axis: AxisName) -> list[Axis]:
    """The interpreters to reduce over in turn; one that covers several axes at once is used once."""
    wanted = names(axis)
    found = [lookup(name) for name in wanted]
    for one in found:
        joint = getattr(one, "joint", None)
        if joint is not None and len(wanted) > 1 and (merged := joint(wanted)) is not None:
            return [merged]
    return found


def psum(x: Tree, axis: AxisName) -> Tree:
    """Sum over the ranks of an axis.

    Args:
        x: A pytree of tensors or numbers, of the same structure, shapes and dtypes on every rank.
        axis: A bound axis name, or a tuple of them.

    Returns:
        The same structure, new tensors, equal on all ranks. Booleans are counted, as int64.

    Raises:
        UnboundAxis: nothing binds the axis.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.psum(x, "data"), {"data": 3}, [1.0, 2.0, 3.0])
    [tensor(6.), tensor(6.), tensor(6.)]
    """
    x = optree.tree_map(lambda v: t.long() if (t := _as_tensor(v)).dtype is torch.bool else t, x)
    return _reduce("psum", x, axis)


def pmean(x: Tree, axis: AxisName) -> Tree:
    """Mean over the ranks of an axis: `psum(x) / axis_size`.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pmean(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor(1.5000), tensor(1.5000)]
    """
    n = axis_size(axis)
    return optree.tree_map(lambda v: v / n, psum(x, axis))


def pmax(x: Tree, axis: AxisName) -> Tree:
    """Elementwise maximum over the ranks of an axis; NaN where any rank has one. No gradient.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pmax(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor(2.), tensor(2.)]
    """
    return _reduce("pmax", x, axis)


def pmin(x: Tree, axis: AxisName) -> Tree:
    """Elementwise minimum over the ranks of an axis; NaN where any rank has one. No gradient.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pmin(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor(1.), tensor(1.)]
    """
    return _reduce("pmin", x, axis)


def pbroadcast(x: Tree, axis: str, source: int) -> Tree:
    """Every rank gets what rank `source` of the axis has.

    Raises:
        ValueError: `source` is no rank of the axis.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.pbroadcast(x, "data", 1), {"data": 2}, [1.0, 2.0])
    [tensor(2.), tensor(2.)]
    """
    one = lookup(axis)
    if not 0 <= source < one.size:
        raise ValueError(f"source must be a rank of axis {axis!r}, 0 to {one.size - 1}, got {source!r}")
    return _packed(x, 0, lambda v: _apply("pbroadcast", v, one, source))


def all_gather(x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    """All ranks' values, stacked along a new dimension or, tiled, concatenated along one.

    Returns:
        Leaves `(..., n, ...)` with n, the size of the axis, at `dim`; tiled: dimension `dim` is n
        times as long. Over a tuple of axes the last one varies fastest.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda x: tx.all_gather(x, "data"), {"data": 2}, [1.0, 2.0])
    [tensor([1., 2.]), tensor([1., 2.])]
    """

    def gather(flat: Tensor) -> Tensor:
        out = flat
        for one in reversed([lookup(name) for name in names(axis)]):
            out = _apply("all_gather", out, one)
        return out.reshape((axis_size(axis), *flat.shape))

    def place(leaf: Tensor) -> Tensor:
        if not tiled:
            return leaf.movedim(0, dim)
        return torch.cat(leaf.unbind(0), dim)

    return optree.tree_map(place, _packed(x, 0, gather))


def psum_scatter(x: Tree, axis: AxisName, *, dim: int = 0, tiled: bool = False) -> Tree:
    """Sum over the ranks, of which rank r keeps the r-th piece along `dim`.

    Args:
        x: Leaves with n, the size of the axis, at `dim`; tiled: with a multiple of n there.
        axis: A bound axis name, or a tuple of them.
        dim: The dimension that is divided.
        tiled: Keep the dimension, n times shorter, instead of dropping it.

    Raises:
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
            out = _apply("psum_scatter", out, one)
        return out

    x = _split_ranks("psum_scatter", x, axis, dim, tiled)
    out = _packed(x, 1, scatter)
    return optree.tree_map(lambda leaf: leaf.movedim(0, dim), out) if tiled else out


def all_to_all(x: Tree, axis: str, split_dim: int = 0, concat_dim: int = 0, *, tiled: bool = False) -> Tree:
    """Rank r sends its s-th piece along `split_dim` to rank s.

    Args:
        x: Leaves with n, the size of the axis, at `split_dim`; tiled: with a multiple of n there.
        axis: A bound axis name.
        split_dim: The dimension that is divided among the receivers.
        concat_dim: Where the pieces received are put, in the order of the senders.
        tiled: Concatenate the pieces along `concat_dim` instead of stacking them.

    Raises:
        ValueError: the dimension does not divide, with the path.

    >>> from fjoin import transforms as tx
    >>> xs = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    >>> tx.simulate(lambda x: tx.all_to_all(x, "data"), {"data": 2}, xs)
    [tensor([1, 3]), tensor([2, 4])]
    """
    one = lookup(axis)

    def place(leaf: Tensor) -> Tensor:
        if not tiled:
            return leaf.movedim(0, concat_dim)
        return torch.cat([piece.movedim(0, split_dim) for piece in leaf.unbind(0)], concat_dim)

    x = _split_ranks("all_to_all", x, axis, split_dim, tiled)
    return optree.tree_map(place, _packed(x, 1, lambda v: _apply("all_to_all", v, one)))


def _split_ranks(op: str, tree: Tree, axis: AxisName, dim: int, tiled: bool) -> Tree:
    """Bring the ranks' dimension of each leaf to the front: (n, ...), tiled: (n, size / n, ...)."""
    n = axis_size(axis)

    def split(path: tuple[Any, ...], leaf: Any) -> Tensor:
        x = _as_tensor(leaf)
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


def ppermute(x: Tree, axis: str, perm: Sequence[tuple[int, int]]) -> Tree:
    """Send each rank's value along `(source, target)` pairs; a rank that is no target gets zeros.

    Raises:
        ValueError: a pair names no rank of the axis, or a source or a target stands twice.

    >>> from fjoin import transforms as tx
    >>> ring = [(0, 1), (1, 2), (2, 0)]
    >>> tx.simulate(lambda x: tx.ppermute(x, "data", ring), {"data": 3}, [1.0, 2.0, 3.0])
    [tensor(3.), tensor(1.), tensor(2.)]
    """
    one = lookup(axis)
    pairs = tuple((int(s), int(t)) for s, t in perm)
    for what, ranks in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"perm names a {what} twice: {pairs}")
        if any(not 0 <= r < one.size for r in ranks):
            raise ValueError(f"perm {pairs} names a {what} outside axis {axis!r}, whose ranks are 0 to {one.size - 1}")
    return _packed(x, 0, lambda v: _apply("ppermute", v, one, pairs))


def axis_index(axis: AxisName) -> Tensor:
    """This rank's index in an axis, 0-d int64; in a tuple of axes the last one varies fastest.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda: tx.axis_index(("node", "local")), {"node": 2, "local": 2})
    [tensor(0), tensor(1), tensor(2), tensor(3)]
    """
    index = torch.tensor(0)
    for one in [lookup(name) for name in names(axis)]:
        index = index * one.size + one.index()
    return index


def axis_size(axis: AxisName) -> int:
    """How many ranks an axis, or a tuple of axes together, has.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda: tx.axis_size("data"), {"data": 2})
    [2, 2]
    """
    return math.prod([lookup(name).size for name in names(axis)])  # a list: torch.compile traces no generator
