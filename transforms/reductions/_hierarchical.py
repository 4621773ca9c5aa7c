"""A mean in two levels: most bytes stay inside a node, and messages between nodes may be encoded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes import all_gather, axis_index, axis_size, psum, psum_scatter
from ..base import (
    Call,
    Compression,
    Needs,
    Over,
    RankWeight,
    Rider,
    Transform,
    Tree,
    check_over,
    decode_words,
    device_of,
    factory,
    first_of,
    lane_dtype,
    named_leaves,
    nonzero_or_one,
    one_axis,
    real,
    to_device,
)
from ..codecs import Codec, check_codec, places_of, refuse_derivative
from ._coded_sum import Reduced, Sums, Term, coded_mean, cut, ravel, reduction, split, unravel, with_residual
from ._error_feedback import ResidualMemory


@factory
def hierarchical_mean(local: str, node: str, codec: Codec | None = None, over: Over = "weight") -> Transform:
    """The mean over two axes: the ranks inside a node, whose links are fast, and the nodes.

    It has three stages:

    - the ranks of a node sum their gradients, and each keeps one part (psum_scatter over `local`);
    - ranks with the same index in their node sum their parts (psum over `node`);
    - the ranks of a node exchange the results (all_gather over `local`).

    So each rank sends across nodes only 1 / (ranks of the node) of the bytes that a mean over all ranks would send.

    Args:
        local: The axis inside a node.
        node: The axis across nodes.
        codec: The codec of messages between nodes; None: floats. `compress(codec, hierarchical_mean(...))` does the
            same, and stochastic codecs need that form.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`.

    Raises:
        ValueError: `over` is none of the three; `local` and `node` are the same axis; `codec` is stochastic.

    Same as: torch's hierarchical sharding of HYBRID_SHARD.

    >>> from fjoin import transforms as tx
    >>> hook = hierarchical_mean("local", "node")
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"node": 2, "local": 2}, [torch.tensor(v) for v in (1.0, 2.0, 3.0, 6.0)])[3]
    tensor(3.)
    """
    check_over(over)
    local, node = one_axis("hierarchical_mean: local", local), one_axis("hierarchical_mean: node", node)
    if local == node:
        raise ValueError(f"local and node must be two axes, got {local!r} for both")
    if codec is not None and check_codec("codec", codec).stochastic:
        raise ValueError(
            f"{codec!r} is stochastic, and its random bits are keyed by steps; write "
            f"compress({codec!r}, hierarchical_mean(...))"
        )

    def reduce(grads: Tree, share: RankWeight, rider: Rider, call: Call) -> Sums:
        of = named_leaves(grads)
        real(of, "hierarchical_mean")
        inside, nodes = axis_size(local), axis_size(node)
        dtype = lane_dtype(leaf.dtype for leaf in of.values())
        own = share.masked(ravel(of.values(), device_of(of.values()), dtype))
        own = own if share.known == 1.0 else own * share.factor.to(own.dtype)
        words = rider.words(dtype, inside * nodes, own.device, share.factor)
        size = -(-own.numel() // inside)
        rows = torch.cat([cut(own, inside, size), words.expand(inside, -1)], dim=1)
        part = psum_scatter(rows, local)
        wire = call.wire or codec
        if wire is None or nodes == 1:
            part = psum(part, node)
            total, sums = first_of(decode_words(part[size:], inside * nodes))
            part = part[:size] / nonzero_or_one(total).to(part)
        else:
            refuse_derivative(of.values(), "differentiate through the hook without its codec, or detach the gradients")
            here, header = first_of(decode_words(part[size:], inside * nodes))
            reduced = _across(wire, part[:size], here, header, local, node, of, call.memory, over)
            total, part, sums = reduced.total, reduced.mean, reduced.words
        if over == "world":
            part = part * (total / (inside * nodes)).to(part)
        whole = all_gather(part, local).flatten()
        return Sums(unravel(whole[: own.numel()], grads), total, sums)

    needs = Needs.NOTHING if codec is None or codec.elementwise else Needs.LAYOUT
    lossy = None if codec is None else Compression(named_leaves)
    return reduction((local, node), over, reduce, needs, compression=lossy, takes=("wire",))


def _across(
    codec: Codec,
    part: Tensor,
    here: Tensor,
    header: Tensor,
    local: str,
    node: str,
    of: dict[str, Tensor],
    memory: ResidualMemory | None,
    over: Over,
) -> Reduced:
    """The mean over the nodes of this rank's part of the gradients.

    A rank keeps the residual of its node's messages for its part, whichever rank of the node has input. So a node
    without input keeps the residual, or flushes it.

    Args:
        part: (size,), the node's sum of weight * gradient.
        here: The node's total, 0-d float64.
    """
    mean, inside, size = (part / nonzero_or_one(here).to(part)).float(), axis_size(local), len(part)
    at = to_device(part.device, axis_index(local)).view(1)

    def mine(whole: Tensor) -> Tensor:
        return cut(whole, inside, size).index_select(0, at)[0]

    def run(term: Term) -> Reduced:
        return coded_mean(term, node)

    term = Term(codec, mean, here, header, positions=mine(places_of(of, part.device)) if codec.stochastic else None)
    if memory is None:
        return run(term)
    if memory.per_rank:
        raise TypeError(
            "between nodes a rank keeps the residual of its node, which ef21 cannot use; use error_feedback"
        )
    share = RankWeight(here, None)
    errors = memory.residuals(of, share)
    reduced, residual = with_residual(run, term, None, mine(ravel(errors, part.device)), memory.flush)
    ranks = inside * axis_size(node)
    divisor = torch.full_like(reduced.total, ranks) if over == "world" else reduced.total
    rows = torch.arange(inside, device=part.device).unsqueeze(1) == at
    residual = torch.where(rows, residual, torch.zeros_like(residual)).flatten()
    memory.keep(of, split(residual[: sum(e.numel() for e in errors)], errors), share, divisor)
    return reduced
