"""Collectives by axis name, with JAX's names and meaning, on pytrees.

One call on a pytree is one message per dtype and 25 MB, with packed leaves; in sums large leaves travel alone. All
collectives except pmax and pmin are differentiable (the derivative is that of the sum of all ranks' outputs, so the
transpose of psum is psum). All work under torch.func.grad, torch.func.vmap over other dimensions, and torch.compile.

Same as: jax.lax's parallel operators; torch.distributed's collectives, without process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import optree
import torch
from torch import Tensor

from .._axis_env import lookup
from .._check import AxisName
from ..tree._tree import Tree
from ._packing import as_tensor, packed
from ._primitive import apply_one, names, reduce_over


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
    x = optree.tree_map(lambda v: t.long() if (t := as_tensor(v)).dtype is torch.bool else t, x)
    return reduce_over("psum", x, axis)


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
