"""Averages of the parameters with one other rank at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from .._check import one_axis
from ..axes._collectives import axis_size, ppermute
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._counter import counts_steps
from ..transform._lane import decode_lane, encode_lane, lane_dtype
from ..transform._transform import Needs, Transform
from ..transform._weights import Over, check_over, check_weight
from ..tree._tree import State, Tree, device_of, to_device, where


class GossipState(NamedTuple):
    step: int  # calls so far, on the host


@factory
def gossip(axis: str, over: Over = "weight") -> Transform:
    """The weighted mean of a rank's parameters and those of one other rank.

    In call k, rank r receives the parameters of rank r - 2^j (modulo the ranks), with j = k modulo ceil(log2(ranks)):
    the exponential graph. With over="world" and 2^n ranks, any n calls in a row give the mean of all ranks.

    Args:
        axis: The axis of the ranks.
        over: The weights of the two ranks; see `average_parameters`. With "weight", those of their windows.

    Returns:
        A `Transform` of parameters, for `fuse(..., after=...)`; the results differ between ranks.
        State: `GossipState(step)`.

    Raises:
        TypeError, ValueError: `axis` is no name; `over` is none of the three.
        UnboundAxis: at `update`: nothing binds `axis`.

    Source: Assran et al., Stochastic Gradient Push, arXiv:1811.10792, appendix A; Ying et al., Exponential Graph Is
        Provably Efficient for Decentralized Deep Training, arXiv:2110.13363.

    >>> from fjoin import transforms as tx
    >>> def one_rank(p):
    ...     pairs = tx.gossip("data")
    ...     state = pairs.init(p)
    ...     for _ in range(2):
    ...         p, state = pairs.update(p, state)
    ...     return p
    >>> tx.simulate(one_rank, {"data": 4}, [torch.tensor(v) for v in (0.0, 4.0, 8.0, 12.0)])
    [tensor(6.), tensor(6.), tensor(6.), tensor(6.)]
    """
    one_axis("gossip", axis)
    check_over(over)

    def init(params: Tree) -> GossipState:
        del params
        return GossipState(0)

    @counts_steps
    def update(values: Tree, state: GossipState, params: Tree, call: Call) -> tuple[Tree, State]:
        del params
        ranks, new = axis_size(axis), GossipState(state.step + 1)
        if ranks == 1:
            return values, new
        shift = 2 ** (state.step % math.ceil(math.log2(ranks)))
        weight = check_weight(call.weight)
        factor = {"weight": weight, "live": (weight > 0).to(weight.dtype), "world": torch.ones_like(weight)}[over]
        leaves = optree.tree_leaves(values)
        words = encode_lane({"weight": factor}, lane_dtype(v.dtype for v in leaves), ranks, device_of(leaves))
        other, words = ppermute((values, words), axis, [(r, (r + shift) % ranks) for r in range(ranks)])
        theirs = decode_lane(words, ["weight"], ranks)["weight"]
        both = to_device(theirs.device, factor) + theirs
        share = theirs / torch.where(both > 0, both, torch.ones_like(both))

        def mix(p: Tensor, q: Tensor) -> Tensor:
            # 0 * nan would be nan.
            p, q = torch.where(share < 1, p, q), torch.where(share > 0, q, p)
            return torch.lerp(p, q, share.to(p.dtype))

        return where(both > 0, optree.tree_map(mix, values, other), values), new

    return Transform(init, update, Needs.NOTHING)
