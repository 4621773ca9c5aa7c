"""Gathers the parameters from the pieces that the ranks have stepped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..groups import Communicator
from ..transforms.axes import Axis, Work, bind_axes
from ..transforms.layout import Pieces
from ..transforms.optimizers import master_of
from ..transforms.pipelines import Effect, Sharding
from ..transforms.reductions import GatherState, ShardState, cut_of
from ._aliases import assign_
from ._storage import Storage


def start_gather(storage: Storage, k: int, mesh: Communicator) -> Work | None:
    """Start filling a bucket of parameters from all ranks' pieces, in place; None if one rank has all of them."""
    pieces, work = storage.pieces, None
    assert pieces is not None
    if pieces.ranks > 1:
        work = mesh.axes[pieces.axis].begin_gather(storage.flats[k], pieces.sizes(k), pieces.rank)
    # A graph that needs the old values must see that they have changed.
    torch.autograd.graph.increment_version(storage.by_bucket[k])
    return work


def gather_leaves(
    pieces: Pieces,
    slices: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    axis: Axis,
    flats: Sequence[Tensor | None] = (),
) -> None:
    """Write all ranks' slices into the parameters; all messages travel at once.

    Args:
        slices: Path -> this rank's slice; needed where `flats` has no memory.
        params: Path -> parameter, in memory of its own.
        flats: By bucket: the memory that its parameters and slices are views of, or None.
    """
    works: list[tuple[Tensor, Work | None]] = []
    for k, bucket in enumerate(pieces.buckets):
        flat = flats[k] if flats else None
        if flat is None:
            flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            start, stop = pieces.bounds[k][pieces.rank : pieces.rank + 2]
            flat[start:stop] = pieces.pack_own(k, slices)
        works.append((flat, axis.begin_gather(flat, pieces.sizes(k), pieces.rank) if pieces.ranks > 1 else None))
    for k, (flat, work) in enumerate(works):
        if work is not None:
            work.wait()
        of = {path: params[path].detach() for path in pieces.buckets[k].paths}
        if flats and flats[k] is not None:  # a graph that needs the old values must see that they have changed
            torch.autograd.graph.increment_version(list(of.values()))
        else:
            new = pieces.leaves(k, flat)
            torch._foreach_copy_(list(of.values()), [new[path] for path in of])


def gather_changes_(storage: Storage, sharding: Sharding, mesh: Communicator, step: int, effect: Effect) -> int:
    """Move the parameters by the encoded changes of all ranks' pieces; returns the number of gathers so far.

    Args:
        step: The number of gathers before.
    """
    assert storage.pieces is not None
    states = storage.optimizer_states() if storage.has_masters else {}
    params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
    with bind_axes(mesh.axes):
        new, state = sharding.gather(storage.pieces, params, storage.own_leaves(), states, gather_state(storage, step))
    assign_(params, effect.where(new, params))
    return state.step


def gather_state(storage: Storage, step: int) -> Any:
    """The state of the gather in the form of the pure pipeline."""
    if storage.pieces is None:
        return ()
    if not storage.exact:
        return ShardState(cut_of(storage.pieces))
    states = storage.optimizer_states() if storage.has_masters else {}
    own = storage.own_leaves()
    return GatherState(
        cut_of(storage.pieces), step, {path: leaf for path, leaf in own.items() if master_of(states.get(path)) is None}
    )
