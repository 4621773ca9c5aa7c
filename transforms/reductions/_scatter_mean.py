"""The mean that leaves each rank its piece, and the gather of parameters behind it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from .. import base
from ..axes import all_to_all_single, axis_index
from ..base import Call, Facts, Needs, Over, Restarted, State, Transform, Tree, devices, factory, trees
from ..codecs import Codec, decode_pieces, encode_rows
from ..layout import Pieces, pieces_here
from ._mean import send, summed


class Cut(NamedTuple):
    """Host numbers that say which pieces a state is of."""

    ranks: Restarted[int]
    rank: Restarted[int]
    fingerprint: Restarted[int]  # of the pieces

    @property
    def unread(self) -> tuple[str, ...]:
        """All fields: a checkpoint leaves them out, since its slices are cut again."""
        return self._fields


class ShardState(NamedTuple):
    """The state of the gather where the parameters are gathered as they are."""

    cut: Cut


class GatherState(NamedTuple):
    """The exact values of this rank's slices, where a codec sends their changes."""

    cut: Cut
    step: int  # calls so far, on the host; it keys the random bits
    master: dict[str, Tensor]  # path -> slice; without the parameters of which the optimizer keeps a master copy


def cut_of(pieces: Pieces) -> Cut:
    return Cut(pieces.ranks, pieces.rank, pieces.fingerprint)


def gather(pieces: Pieces, slices: Tree, like: Tree) -> Tree:
    """The whole parameters, from every rank's slices.

    Args:
        slices: This rank's slices.
        like: A tree of the structure of the parameters.
    """
    own, whole = trees.named_leaves(slices), {}
    for k in range(len(pieces.buckets)):
        whole.update(pieces.leaves(k, _from_all(pieces.pack_own(k, own), pieces, pieces.sizes(k))))
    return trees.map_with_path(lambda path, _: whole[path], like)


def gather_changes(pieces: Pieces, slices: Tree, params: Tree, codec: Codec, step: int) -> Tree:
    """The whole parameters, moved by the encoded changes of every rank's slices.

    Every rank, the owner included, adds the decoded changes, so all have equal parameters. What the code loses is in
    the next change, since that starts from these parameters.

    Args:
        slices: The exact new values of this rank's slices, in the dtype of the parameters or a wider one.
        params: The old parameters, equal on all ranks.
        step: It keys the random bits of a stochastic codec.
    """
    own, old, new = trees.named_leaves(slices), trees.named_leaves(params), {}
    codec = codec.keyed(0, step) if codec.stochastic and codec.key is None else codec
    before = trees.named_leaves(pieces.own(params))
    for k in range(len(pieces.buckets)):
        changes = pieces.pack_own(
            k, {path: (own[path] - old_.to(own[path].dtype)).float() for path, old_ in before.items()}
        )
        sizes = pieces.sizes(k)
        codes = encode_rows(codec, changes.unsqueeze(0), axis_index(pieces.axis))[0]
        data = _from_all(codes, pieces, tuple(map(codec.width, sizes)))
        moved = pieces.leaves(k, decode_pieces(codec, data, sizes))
        new.update({path: (devices.widened(old[path]) + change).to(old[path].dtype) for path, change in moved.items()})
    return trees.map_with_path(lambda path, _: new[path], params)


def _from_all(own: Tensor, pieces: Pieces, sizes: tuple[int, ...]) -> Tensor:
    """The pieces of all ranks, one after the other."""
    if pieces.ranks == 1:
        return own
    given = (sizes[pieces.rank],) * pieces.ranks
    return all_to_all_single(own.repeat(pieces.ranks), pieces.axis, input_split_sizes=given, output_split_sizes=sizes)


@factory
def scatter_mean(axis: str, over: Over = "weight") -> Transform:
    """The mean of all ranks' gradients, of which each rank gets the piece that it owns.

    In `fuse` each rank then steps its own piece, with an optimizer state of that piece alone, and gathers the
    parameters from all ranks. This is ZeRO, stage 1: a step sends as many bytes as with `mean`, and the optimizer's
    state takes 1 / ranks of the memory.

    The result is a tree with the paths of `grads`. Of each leaf it has the slice in this rank's piece: flat, in logical
    order, empty where no part of the leaf is in the piece. Parameters whose optimizer needs the whole leaf, such as
    `muon`, have one owner, which gets the leaf in its shape. Transforms after it in a chain get slices, of the
    parameters too; those that look at the whole tree get `call.sharded_over`, over which they must sum.

    Pieces are cut from buckets at multiples of 64 bytes. `fuse` and `fjoin.train_step` cut the same ones. Without
    `fuse` they are cut from one bucket of all leaves.

    Args:
        axis: The axis over which gradients are averaged and sharded. `chain(scatter_mean("local"), mean("node"))`
            shards within a node, and averages between the nodes.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns this rank's slices. It has no state.

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

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        pieces, of = pieces_here(grads, axis), trees.named_leaves(grads)
        share, slices = call.share(axis, over, trees.device_of(of.values())), dict[str, Tensor]()
        late = share.behind_sum(list(of.values()))
        own_share = share._replace(total=None) if late else share
        for k in range(len(pieces.buckets)):
            if call.wire is not None and pieces.ranks > 1:
                reduce = functools.partial(_coded_scatter, axis, pieces.sizes(k))
                own = send(pieces.with_padding(k, of), share, call, reduce)
            else:
                own = _scatter(pieces, k, own_share.times(pieces.pack(k, of)), axis)
                own = share.divided([own])[0] if late else own
            slices.update({path: part.to(of[path].dtype) for path, part in pieces.leaves_own(k, own).items()})
        out = trees.map_with_path(lambda path, _: slices[path], grads)
        return (share.where_any_live(out, pieces.own(grads)) if call.persistent else out), state

    return Transform(
        lambda params: (),
        update,
        Needs.NOTHING,
        facts=Facts(reduces=base.Reduction(axis, over, True, True), takes=("wire",)),
    )


@factory
def mean_of_sums(axis: str, over: Over = "weight") -> Transform:
    """The mean of gradients of which each rank has pieces of the sum: torch's fully_shard has summed them, or the
    backward pass of `all_gather`, and each loss was multiplied by what its rank counts.

    It takes the place of `mean` in a pipeline on pieces, and only divides.
    """

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        leaves, structure = optree.tree_flatten(grads)
        share = call.share(axis, over, trees.device_of(leaves))
        one = base.Share(1.0, base.shares.nonzero_or_one(share.total))
        return optree.tree_unflatten(structure, share.divided(leaves) if call.donated else one.of(leaves)), state

    reduces = base.Reduction(axis, over, scatters=True, arrives=True)
    return Transform(lambda params: (), update, Needs.NOTHING, facts=Facts(reduces=reduces, takes=("donated",)))


def _coded_scatter(
    axis: str, sizes: tuple[int, ...], codec: Codec, x: Tensor, places: Tensor | None, feeds: bool
) -> tuple[Tensor, Tensor | None]:
    """As `coded_sum`, but the sum is only this rank's part, and is not sent to the others.

    Args:
        sizes: The number of floats for each rank.
    """
    here, ranks = int(axis_index(axis)), len(sizes)
    at = [None] * ranks if places is None else places.unsqueeze(0).split(sizes, dim=1)
    pieces = zip(x.unsqueeze(0).split(sizes, dim=1), at, strict=True)
    codes = [encode_rows(codec, piece, here, positions=where)[0] for piece, where in pieces]
    give, take = list(map(len, codes)), [len(codes[here])] * ranks
    sent = torch.cat(codes)
    data = all_to_all_single(sent, axis, input_split_sizes=give, output_split_sizes=take)
    total = summed(codec, data.view(ranks, take[here]), sizes[here])
    return total, x - decode_pieces(codec, sent, sizes) if feeds else None


def _scatter(pieces: Pieces, k: int, flat: Tensor, axis: str) -> Tensor:
    """The sum of this rank's piece of a bucket, added in the order of the ranks."""
    own = pieces.sizes(k)[pieces.rank]
    rows = all_to_all_single(flat, axis, input_split_sizes=pieces.sizes(k), output_split_sizes=(own,) * pieces.ranks)
    return devices.sum_in_order(rows.view(pieces.ranks, own).unbind(0))
