"""Gathers the parameters from the pieces of all ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._sums import widened
from ..axes._collectives import axis_index
from ..axes._ragged import all_to_all_single
from ..codecs._codec import Codec
from ..codecs._rows import decode_pieces, encode_rows
from ..layout._pieces import Pieces
from ..tree._placement import Restarted
from ..tree._tree import Tree, map_with_path, named_leaves


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
    own, whole = named_leaves(slices), {}
    for k in range(len(pieces.buckets)):
        whole.update(pieces.leaves(k, _from_all(pieces.pack_own(k, own), pieces, pieces.sizes(k))))
    return map_with_path(lambda path, _: whole[path], like)


def gather_changes(pieces: Pieces, slices: Tree, params: Tree, codec: Codec, step: int) -> Tree:
    """The whole parameters, moved by the encoded changes of every rank's slices.

    Every rank, the owner included, adds the decoded changes, so all have equal parameters. What the code loses is in
    the next change, since that starts from these parameters.

    Args:
        slices: The exact new values of this rank's slices, in the dtype of the parameters or a wider one.
        params: The old parameters, equal on all ranks.
        step: It keys the random bits of a stochastic codec.
    """
    own, old, new = named_leaves(slices), named_leaves(params), {}
    codec = codec.keyed(0, step) if codec.stochastic and codec.key is None else codec
    before = named_leaves(pieces.own(params))
    for k in range(len(pieces.buckets)):
        changes = pieces.pack_own(
            k, {path: (own[path] - old_.to(own[path].dtype)).float() for path, old_ in before.items()}
        )
        sizes = pieces.sizes(k)
        codes = encode_rows(codec, changes.unsqueeze(0), axis_index(pieces.axis))[0]
        data = _from_all(codes, pieces, tuple(map(codec.width, sizes)))
        moved = pieces.leaves(k, decode_pieces(codec, data, sizes))
        new.update({path: (widened(old[path]) + change).to(old[path].dtype) for path, change in moved.items()})
    return map_with_path(lambda path, _: new[path], params)


def _from_all(own: Tensor, pieces: Pieces, sizes: tuple[int, ...]) -> Tensor:
    """The pieces of all ranks, one after the other."""
    if pieces.ranks == 1:
        return own
    given = (sizes[pieces.rank],) * pieces.ranks
    return all_to_all_single(own.repeat(pieces.ranks), pieces.axis, input_split_sizes=given, output_split_sizes=sizes)
