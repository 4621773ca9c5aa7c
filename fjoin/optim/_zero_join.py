"""A sharded optimizer on ranks that are out of input, in a Join of torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed.algorithms.join as torch_join
from torch import Tensor

from ..groups._axis import GroupAxis
from ..transforms.layout._pieces import Pieces


class Shard(NamedTuple):
    """The pieces of one parameter group."""

    pieces: Pieces
    params: dict[str, Tensor]  # path -> parameter; the path is its number in the group
    slices: dict[str, Tensor]  # path -> this rank's slice: a view of the parameter where that is contiguous
    flats: list[Tensor | None]  # by bucket: the parameters' memory, where they are views of it


class StepsInAJoin(Protocol):
    """The part of a ZeroRedundancyOptimizer that its hook uses."""

    run: Any

    def shadow_step(self) -> None: ...


def own_gradients(shards: Sequence[Shard]) -> list[dict[str, Tensor | None]]:
    """The gradients that the parameters have on this rank."""
    return [{path: p.grad for path, p in shard.params.items()} for shard in shards]


@torch.no_grad()
def give(shards: Sequence[Shard], grads: Sequence[dict[str, Tensor | None]]) -> None:
    """Give this rank's pieces their values and gradients."""
    for shard, of in zip(shards, grads, strict=True):
        for path, own in shard.slices.items():
            (start, stop), p, grad = shard.pieces.slices[path], shard.params[path], of[path]
            if own.numel():
                if not p.is_contiguous():
                    own.copy_(p.reshape(-1)[start:stop].view(own.shape))
                # A gradient that is this rank's slice already came from another rank.
                whole = grad is not None and grad.shape == p.shape
                own.grad = grad.reshape(-1)[start:stop].view(own.shape) if whole and grad is not None else grad


def gradients(axis: GroupAxis, shards: Sequence[Shard], live: bool) -> list[dict[str, Tensor | None]]:
    """The gradients by group and path: those of this rank, or on a rank without input its slices of another's.

    DistributedDataParallel leaves no gradients on a rank without input. The lowest of the other ranks sends it
    those of its slices.
    """
    device = shards[0].pieces.buckets[0].device if shards[0].pieces.buckets else torch.device("cpu")
    bits = torch.zeros(axis.size, device=device)
    bits[axis.rank] = float(live)
    with_input = axis.run("psum", bits, None).tolist()
    own = own_gradients(shards)
    if all(with_input):
        return own
    sender = with_input.index(1.0)
    sends = axis.rank == sender
    has = [[float(sends and grad is not None) for grad in of.values()] for of in own]
    counts = [len(of) for of in has]
    given = axis.run("psum", torch.tensor(sum(has, []), device=device), None).split(counts)
    found = []
    for shard, of, mask in zip(shards, own, given, strict=True):
        present = dict(zip(shard.params, mask.tolist(), strict=True))
        parts: dict[str, Tensor | None] = {}
        for k in range(len(shard.pieces.buckets)):
            parts.update(_receive(axis, shard, k, of, sender, with_input))
        found.append(of if live else {path: part if present[path] else None for path, part in parts.items()})
    return found


def _receive(
    axis: GroupAxis,
    shard: Shard,
    k: int,
    grads: dict[str, Tensor | None],
    sender: int,
    with_input: list[float],
) -> dict[str, Tensor]:
    """The slices of one bucket's gradients on a rank without input; on the others empty slices."""
    pieces, bucket, sizes = shard.pieces, shard.pieces.buckets[k], shard.pieces.sizes(k)
    give, take = [0] * axis.size, [0] * axis.size
    flat = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
    if axis.rank == sender:
        give = [0 if with_input[r] else sizes[r] for r in range(axis.size)]
        leaves = {p: torch.zeros_like(shard.params[p]) if grads[p] is None else grads[p] for p in bucket.paths}
        whole = pieces.pack(k, leaves)  # type: ignore[arg-type]
        flat = torch.cat([part for part, n in zip(whole.split(list(sizes)), give, strict=True) if n] or [flat])
    if not with_input[axis.rank]:
        take[sender] = sizes[axis.rank]
    received = axis.run("all_to_all_single", flat, (tuple(give), tuple(take)))
    return {} if with_input[axis.rank] else pieces.leaves_own(k, received)


class ZeroHook(torch_join.JoinHook):
    """The work of a rank that is out of input.

    A main hook only begins a step, in a thread: the gradients are those of a pass of the module, whose own main hook may
    come after this one. The next main hook, or the post hook, waits for it.
    """

    def __init__(self, zero: StepsInAJoin, watch: Any) -> None:
        self._zero, self._watch = zero, watch
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def main_hook(self) -> None:
        self._finish()
        if self._zero.run is None:  # else the shadow pass of the module steps
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._watch.remove()
        self._finish()

    def _run(self) -> None:
        try:
            self._zero.shadow_step()
        except BaseException as error:
            self._error = error

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
