"""Reductions that are not a sum: all values to all ranks, and a vote."""

from __future__ import annotations

import functools

import optree
import torch
from torch import Tensor

from .._axis_env import AxisName
from .._check import some_axes
from ..axes._collectives import axis_size
from ..axes._gather_scatter import all_gather
from ..codecs._bit_packing import pack, unpack, width
from ..codecs._codec import Codec, as_bytes, poison, read
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._lane import decode_words, lane_dtype
from ..transform._rider import Rider, first_of
from ..transform._transform import Transform
from ..transform._weights import Over, RankWeight, check_over, divisor_of, nonzero_or_one
from ..tree._tree import Tree, device_of
from ._coded_mean import coded_mean, gathered_mean
from ._encoded_mean import encoded_mean
from ._reduction import Sums, reduction


@factory
def all_gather_mean(axis: AxisName, over: Over = "weight") -> Transform:
    """The weighted mean by all_gather: every rank sums all ranks' gradients in the order of the ranks.

    So the result is the same to the bit on every transport, and inside `compress(codec, ...)` gradients are encoded
    only once. The bytes grow with the ranks: ranks - 1 times the gradients, or their codes.

    Args:
        axis: The axis, or a tuple of axes.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`.

    Raises:
        ValueError: `over` is none of the three.

    Same as: how torch's quantization hooks reduce; the usual form of top-k compression.

    >>> from fjoin import transforms as tx
    >>> hook = tx.compress(tx.top_k(1), all_gather_mean("data"))
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([3.0, 2.0]), torch.tensor([0.0, 8.0])])[0]
    tensor([1.5000, 4.0000])
    """
    some_axes("all_gather_mean", axis)
    check_over(over)

    def reduce(grads: Tree, share: RankWeight, rider: Rider, call: Call) -> Sums:
        if call.wire is not None and axis_size(axis) > 1:
            return encoded_mean(grads, axis, share, over, rider, call, gathered_mean)
        ranks, leaves = axis_size(axis), optree.tree_leaves(grads)
        words = rider.words(lane_dtype(leaf.dtype for leaf in leaves), 1, device_of(leaves), share.factor)
        all_grads, all_words = all_gather((optree.tree_map(share.masked, grads), words), axis)
        each = torch.stack([decode_words(row, 1) for row in all_words.unbind(0)])
        factors, (total, sums) = each[:, 0], first_of(each.sum(0))
        divisor = nonzero_or_one(divisor_of(over, total, ranks))
        parts = [factor / divisor for factor in factors]

        def mean(rows: Tensor) -> Tensor:
            wide = torch.promote_types(rows.dtype, torch.float32)
            out = rows[0].to(wide) * parts[0].to(rows.device, wide)
            for row, part in zip(rows[1:], parts[1:], strict=True):
                out = out + row.to(wide) * part.to(rows.device, wide)
            return out.to(rows.dtype)

        return Sums(optree.tree_map(mean, all_grads), total, sums)

    return reduction(axis, over, reduce, takes=("donated", "wire", "memory"))


@factory
def majority_vote(axis: AxisName, over: Over = "weight") -> Transform:
    """The sign of the weighted sum of all ranks' signs: each element -1, 0 or 1.

    A byte holds five votes, in the message to the rank that counts them and in the message back. An element that is 0
    on a rank, such as an embedding row of a word that the rank has not seen, is no vote; a rank without input has no
    vote either. A tie, within 2**-21 of all weights for each rank, gives 0.

    Args:
        axis: The axis, or several axes; the last one votes first.
        over: "weight": votes count by weight; "live" and "world": each rank with input has one.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks. All elements of a message are NaN
        if one of them is not finite.
        State: `MeanState(total, lane)`.

    Raises:
        ValueError: `over` is none of the three.
        TypeError, RuntimeError: at `update`: as `compress`.

    Source: Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant,
        arXiv:1810.05291, whose votes have no 0.

    >>> from fjoin import transforms as tx
    >>> hook = majority_vote("data")
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 3}, [torch.tensor([v, v - 1, 0.0]) for v in (5.0, 0.5, -1.0)])[0]
    tensor([ 1., -1.,  0.])
    """
    some_axes("majority_vote", axis)
    check_over(over)
    votes = _votes()
    counts: Over = "weight" if over == "weight" else "live"

    def reduce(grads: Tree, share: RankWeight, rider: Rider, call: Call) -> Sums:
        coded = functools.partial(coded_mean, map_mean=functools.partial(_outcome, axis_size(axis)))
        alone = call.inside(wire=votes, memory=None, donated=False)
        found = encoded_mean(grads, axis, share, counts, rider, alone, coded)
        if axis_size(axis) == 1:
            found = found._replace(out=optree.tree_map(lambda g: torch.sign(g) + 0 * g, found.out))
        return found

    return reduction(axis, over, reduce, counts=counts, linear=False)


def _outcome(ranks: int, mean: Tensor) -> Tensor:
    """The sign of the mean, 0 where weights cancel up to a rounding error; non-finite values stay non-finite."""
    return torch.where(mean.abs() < ranks * 2.0**-21, torch.zeros_like(mean), torch.sign(mean)) + 0 * mean


def _votes() -> Codec:
    """A codec of -1, 0 and 1, with a flag for each row: whether all of it is finite."""

    def encode(x: Tensor) -> Tensor:
        digits = torch.sign(x).add(1.0).nan_to_num(0.0).to(torch.uint8)
        return torch.cat([as_bytes(poison(x)), pack(digits, 3)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        return unpack(data[:, 4:], n, 3).to(torch.float32) - 1.0 + read(data[:, :4], torch.float32)

    return Codec(encode, decode, lambda n: 4 + width(n, 3))
