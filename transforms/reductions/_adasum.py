"""Adasum: a sum of gradients that counts their common direction only once."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from .._axis_env import AxisName
from .._check import one_axis
from ..axes._collectives import axis_index, axis_size, ppermute, psum
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._rider import Rider, first_of, no_words
from ..transform._transform import Needs, Transform
from ..transform._weights import RankWeight, nonzero_or_one
from ..tree._tree import Tree, device_of, to_device
from ._reduction import Sums, reduction


@factory
def adasum(axis: AxisName) -> Transform:
    """Adds gradients pairwise: sums orthogonal gradients and averages parallel ones.

        a + b  becomes  (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b,    for each leaf

    The sum of a pair is reduced by half of the projection of each gradient onto the other. It takes log2(ranks) rounds;
    in each round a rank sends all its gradients to one other rank. If the number of ranks is no power of two, the ranks
    above the largest power of two send their gradients away before the first round and receive the result after the
    last one.

    A rank without input adds nothing; apart from that, weights have no effect. `explain` counts a message in every
    round; ranks with nothing to send skip it.

    Args:
        axis: One axis.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks to the bit. Sums are taken in at
        least float32.
        State: `MeanState(total, lane)`; `total` is the number of ranks with input.

    Raises:
        ValueError: several axes.

    Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, arXiv:2006.02924, section 3.

    >>> from fjoin import transforms as tx
    >>> hook = adasum("data")
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])])[0]
    tensor([2., 4.])
    >>> tx.simulate(one_rank, {"data": 3}, [torch.tensor([v, v]) for v in (1.0, 2.0, 3.0)])[2]
    tensor([2., 2.])
    """
    axis = one_axis("adasum", axis)

    def reduce(grads: Tree, share: RankWeight, rider: Rider, call: Call) -> Sums:
        del call
        # Contiguous, like the tensors received from other ranks: sums over other strides round in another order.
        wide = optree.tree_map(
            lambda g: share.masked(g).to(torch.promote_types(g.dtype, torch.float32)).contiguous(), grads
        )
        summed = _over_ranks(wide, axis)
        out = optree.tree_map(lambda s, g: s.to(g.dtype), summed, grads)
        if not rider.goes_along:
            return Sums(out, rider.total, no_words())
        words = rider.words(torch.float64, 1, device_of(optree.tree_leaves(grads)), share.factor)
        return Sums(out, *first_of(psum(words, axis)))

    return reduction(axis, "live", reduce, Needs.LEAVES, linear=False)


def _over_ranks(own: Tree, axis: str) -> Tree:
    ranks, me = axis_size(axis), axis_index(axis)
    power = 1 << (ranks.bit_length() - 1)
    if rest := ranks - power:
        own = _both(own, ppermute(own, axis, [(power + r, r) for r in range(rest)]), me < rest)
    step = 1
    while step < power:
        other = ppermute(own, axis, [(r, r ^ step) for r in range(power)])
        own = _both(own, other, me < power)
        step *= 2
    if rest:
        back = ppermute(own, axis, [(r, power + r) for r in range(rest)])
        own = optree.tree_map(lambda a, b: torch.where(to_device(a.device, me >= power), b, a), own, back)
    return own


def _both(own: Tree, other: Tree, here: Tensor) -> Tree:
    """The adaptive sum where `here`, else `own`. It is symmetric: both ranks of a pair compute the same bits."""

    def add(a: Tensor, b: Tensor) -> Tensor:
        # Scaled to values near 1, whose squares neither overflow nor underflow.
        size = nonzero_or_one(torch.maximum(_largest(a), _largest(b)))
        dot, aa, bb = (torch.sum(p / size * (q / size)) for p, q in ((a, b), (a, a), (b, b)))
        summed = (1 - dot / (2 * nonzero_or_one(aa))) * a + (1 - dot / (2 * nonzero_or_one(bb))) * b
        return torch.where(to_device(a.device, here), summed, a)

    return optree.tree_map(add, own, other)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())
