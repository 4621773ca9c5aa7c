"""The pieces of a parameter group that ranks own, and this rank's slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...buckets._gather_pieces import gather_leaves
from ...groups.axes._axis import GroupAxis
from ...transforms.layout._pieces import Pieces, cut
from ...transforms.tree._check_tree import check_dense

Gradients = dict[str, Tensor | None]  # path -> gradient


class Shard(NamedTuple):
    """The pieces of one parameter group."""

    pieces: Pieces
    params: dict[str, Tensor]  # path -> parameter; the path is its number in the group
    slices: dict[str, Tensor]  # path -> this rank's slice: a view of the parameter where that is contiguous
    flats: list[Tensor | None]  # by bucket: the parameters' memory, where they are views of it


class OwnSlice(NamedTuple):
    """This rank's slice of a flat parameter."""

    shape: torch.Size  # of the parameter
    start: int
    stop: int  # 0 where the rank owns nothing of it
    whole: bool  # whether the optimizer needs the whole parameter, which one rank then owns


def own_slices(shards: Sequence[Shard]) -> dict[int, OwnSlice]:
    """By the number of the parameter in all groups."""
    every = ((shard.pieces, path) for shard in shards for path in shard.params)
    return {
        number: OwnSlice(pieces.shapes[path], *pieces.slices[path], path in pieces.whole)
        for number, (pieces, path) in enumerate(every)
    }


def own_gradients(shards: Sequence[Shard]) -> list[Gradients]:
    """The gradients that the parameters have on this rank, by group."""
    return [{path: p.grad for path, p in shard.params.items()} for shard in shards]


@torch.no_grad()
def give(shards: Sequence[Shard], grads: Sequence[Gradients]) -> None:
    """Give this rank's slices their values and gradients."""
    for shard, of in zip(shards, grads, strict=True):
        for path, own in shard.slices.items():
            (start, stop), p, grad = shard.pieces.slices[path], shard.params[path], of[path]
            if own.numel():
                if not p.is_contiguous():
                    own.copy_(p.reshape(-1)[start:stop].view(own.shape))
                # A gradient that is this rank's slice already came from another rank.
                if grad is not None and grad.shape == p.shape:
                    grad = grad.reshape(-1)[start:stop].view(own.shape)
                own.grad = grad


def gather(shards: Sequence[Shard], axis: GroupAxis) -> None:
    """Write all ranks' slices into the parameters."""
    for shard in shards:
        for own in shard.slices.values():
            own.grad = None
        gather_leaves(shard.pieces, shard.slices, shard.params, axis, shard.flats)


@torch.no_grad()
def cut_group(group: Sequence[Tensor], part: Any, ranks: int, rank: int, as_views: bool) -> Shard:
    """The pieces of a group of parameters.

    Args:
        part: The optimizer.
        as_views: Whether to make the parameters of a bucket views of one tensor.
    """
    params = {str(i): p for i, p in enumerate(group)}
    for path, p in params.items():
        check_dense(f"parameter {path} of a group", p)
    pieces = cut(params, part, "data", ranks, rank)
    flats: list[Tensor | None] = []
    for k, bucket in enumerate(pieces.buckets):
        flat = None
        # A module relies on the strides of its parameters.
        if as_views and all(params[path].is_contiguous() for path in bucket.paths):
            flat = pieces.pack(k, {path: p.detach() for path, p in params.items()}).clone()
            for path, view in pieces.leaves(k, flat).items():
                params[path].data = view
        flats.append(flat)
    own = pieces.own({path: p.detach() for path, p in params.items()})
    slices = {path: piece.detach().requires_grad_(params[path].requires_grad) for path, piece in own.items()}
    return Shard(pieces, params, slices, flats)
