"""A mean that leaves each rank its piece."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._sums import divided, sum_in_order
from ..axes._collectives import axis_size, psum
from ..axes._ragged import all_to_all_single
from ..layout._bound_pieces import pieces_here
from ..layout._pieces import Pieces
from ..reductions._encoded_mean import encoded_mean
from ..reductions._reduction import Sums, reduction
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._lane import decode_words
from ..transform._rider import Rider, first_of, no_words
from ..transform._transform import Transform
from ..transform._weights import Over, RankWeight, Unit, check_over, divisor_of, lacks_unit, nonzero_or_one, unit_near
from ..tree._tree import Tree, device_of, map_with_path, named_leaves, plain
from ._coded_scatter import coded_scatter


@factory
def scatter_mean(axis: str, over: Over = "weight") -> Transform:
    """The mean of all ranks' gradients, of which each rank gets the piece that it owns.

    In `fuse` each rank then steps its own piece, with an optimizer state of that piece alone, and gathers the
    parameters from all ranks. This is ZeRO, stage 1: a step sends as many bytes as with `mean`, and the optimizer's
    state takes 1 / ranks of the memory.

    The result is a tree with the paths of `grads`. Of each leaf it has the slice in this rank's piece: flat, in logical
    order, empty where no part of the leaf is in the piece. Parameters whose optimizer needs the whole leaf, such as
    `muon`, have one owner, which gets the leaf in its shape. Transforms behind it in a chain get slices, of the
    parameters too; those that look at the whole tree get `extra["sharded_over"]`, over which they must sum.

    Pieces are cut from buckets at multiples of 64 bytes. `fuse` and `fjoin.train_step` cut the same ones. Without
    `fuse` they are cut from one bucket of all leaves.

    Args:
        axis: The axis over which gradients are averaged and sharded. `chain(scatter_mean("local"), mean("node"))`
            shards within a node, and averages between the nodes.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns this rank's slices.
        State: `MeanState(total, lane)`, as of `mean`. The lane is sent in a small message of its own.

    Raises:
        TypeError: `axis` is not one name.
        ValueError: `over` is none of the three.
        UnboundAxis: at `update`, and at the `init` of a pipeline: nothing binds `axis`.

    Same as: the reduction of ZeRO stage 1, of DeepSpeed and of torch's ZeroRedundancyOptimizer.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.1.

    >>> from fjoin import transforms as tx
    >>> def one_rank(g):
    ...     hook = tx.scatter_mean("data")
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.arange(18.0), torch.ones(18)])
    [tensor([0.5000, 1.0000, 1.5000, 2.0000, 2.5000, 3.0000, 3.5000, 4.0000, 4.5000,
            5.0000, 5.5000, 6.0000, 6.5000, 7.0000, 7.5000, 8.0000]), tensor([8.5000, 9.0000])]
    """
    if not isinstance(axis, str):
        raise TypeError(
            f"scatter_mean takes the name of one axis, got {axis!r}; shard over one and average over the others: "
            f"chain(scatter_mean('local'), mean('node'))"
        )
    check_over(over)

    def reduce(grads: Tree, share: RankWeight, rider: Rider, call: Call) -> Sums:
        pieces, of, wire = pieces_here(grads, axis), named_leaves(grads), call.wire
        found = _sum_rider(of, axis, share, rider) if rider.goes_along else None
        slices: dict[str, Tensor] = {}
        sums: list[Tensor] = []
        scale: Unit = (call.unit or 1.0) if over == "weight" else 1.0
        if any(lacks_unit(call.unit, leaf) for leaf in of.values()):
            scale = unit_near(divisor_of(over, found[0] if found else rider.total, axis_size(axis)))
        for k in range(len(pieces.buckets)):
            if wire is not None and pieces.ranks > 1:
                scatter = functools.partial(coded_scatter, sizes=pieces.sizes(k))
                into = functools.partial(_like, pieces, k, of)
                given = pieces.with_padding(k, of)
                slices.update(encoded_mean(given, axis, share, over, rider.without_words(), call, scatter, into).out)
            else:
                sums.append(_scatter(pieces, k, share.times(pieces.pack(k, of), scale), axis))
        total, words = found or (rider.total, no_words())
        divisor = nonzero_or_one(divisor_of(over, total, axis_size(axis)))
        for k, piece in enumerate(sums):
            slices.update(pieces.leaves_own(k, _divided(piece, divisor * scale)))
        kept = pieces.own(grads) if call.persistent else None
        return Sums(map_with_path(lambda path, _: slices[path], grads), total, words, kept)

    return reduction(axis, over, reduce, fusable=True, scatters=True, takes=("wire", "memory"))


def _sum_rider(of: dict[str, Tensor], axis: str, share: RankWeight, rider: Rider) -> tuple[Tensor, Tensor]:
    """The sums of the factors and of the rider, in a message of their own."""
    ranks = axis_size(axis)
    words = rider.words(rider.dtype(of.values()), ranks, device_of(of.values()), share.factor)
    return first_of(decode_words(psum(words, axis), ranks))


def _scatter(pieces: Pieces, k: int, flat: Tensor, axis: str) -> Tensor:
    """The sum of this rank's piece of a bucket, added in the order of the ranks."""
    own = pieces.sizes(k)[pieces.rank]
    rows = all_to_all_single(flat, axis, input_split_sizes=pieces.sizes(k), output_split_sizes=(own,) * pieces.ranks)
    return sum_in_order(rows.view(pieces.ranks, own).unbind(0))


def _divided(piece: Tensor, divisor: Tensor) -> Tensor:
    if plain(piece) and piece._base is None and piece.dtype.itemsize >= 4:
        torch._foreach_div_([piece], divisor)
        return piece
    return divided(piece, divisor)


def _like(pieces: Pieces, k: int, given: dict[str, Tensor], piece: Tensor) -> dict[str, Tensor]:
    """Path -> slice of this rank's piece, in the dtypes of the given leaves."""
    return {path: part.to(given[path].dtype) for path, part in pieces.leaves_own(k, piece).items()}
