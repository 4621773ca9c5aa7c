"""Numbered messages among ranks of one host."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from ..transforms.base import devices
from ._links import Exchange, HostLinks
from ._packets import INLINE_BYTES

# Elements that are combined at once, so that the parts stay in the cache.
_CHUNK_BYTES = 256 * 1024
Fold = Callable[..., Tensor]  # of two tensors, with out=


class HostChannel:
    """Messages among some of the ranks of a host, which all start them in the same order.

    Args:
        links: The connections of this rank to the ranks of its host.
        number: The number of this channel among those that use the links.
        ranks: The ranks, as the links count them.
        rank: The index of this rank among them.
        failing: Raises where another rank has failed; called at intervals of a wait.
        launched: Counts a message, given its collective, its input and the argument; returns a context in which the
            host waits.
    """

    def __init__(
        self,
        links: HostLinks,
        number: int,
        ranks: Sequence[int],
        rank: int,
        failing: Callable[[], None] = lambda: None,
        launched: Callable[[str, Tensor, Any], AbstractContextManager[None]] = lambda *sent: contextlib.nullcontext(),
    ) -> None:
        self.links, self.number, self.ranks, self.rank = links, number, list(ranks), rank
        self._failing, self._launched, self._message = failing, launched, 0

    def exchange(
        self,
        op: str,
        source: Tensor,
        ranges: Sequence[tuple[int, int]],
        take: Callable[[list[Tensor]], float | None],
        pushes: bool = False,
        settles: bool = False,
        inline: bool = True,
        same: object = None,
        arg: Any = None,
    ) -> Exchange:
        """Start a message in which the rank at index i gets a range of `source`.

        Args:
            arg: The argument of the collective.
            take: Gets all ranks' parts for this rank, in rank order.
            pushes, settles, inline: See `Exchange`.
            same: Everything that must be the same on all ranks: sizes or shapes, a root, pairs.
        """
        self._message += 1
        waiting = self._launched(op, source, arg)
        source = flat_view(source.detach())
        others = {rank: ranges[i] for i, rank in enumerate(self.ranks) if i != self.rank}
        first, last = ranges[self.rank]

        def taken(parts: dict[int, Tensor]) -> float | None:
            parts[self.ranks[self.rank]] = exchange.source[first:last]
            return take([parts[rank] for rank in self.ranks])

        call = zlib.crc32(f"{op} {source.dtype} {same}".encode())
        links, key = self.links, (self.number, self._message)
        exchange = Exchange(links, key, source, others, call, taken, self._failing, waiting, pushes, settles, inline)
        # Profilers see it, as they see the messages of a process group.
        with record_function(f"fjoin::{op}") if profiler._is_profiler_enabled else contextlib.nullcontext():
            links.start(exchange)
        return exchange

    def reduce_(self, op: str, flat: Tensor, fold: Fold = torch.add, same: object = None) -> Exchange:
        """Start combining all ranks' values of a flat buffer in place, in rank order.

        Args:
            same: See `exchange`; by default the buffer's size.
        """
        flat = flat_view(flat)
        n, ranks = len(flat), len(self.ranks)
        same = n if same is None else same
        if flat.nbytes <= INLINE_BYTES:
            return self.exchange(op, flat, [(0, n)] * ranks, lambda parts: combine(parts, [flat], fold), same=same)
        bounds = [i * n // ranks for i in range(ranks + 1)]
        pieces = list(zip(bounds, bounds[1:], strict=False))
        return self.exchange(op, flat, pieces, lambda parts: combine(parts, parts, fold), pushes=True, same=same)


def flat_view(x: Tensor) -> Tensor:
    """The values, 1-d with stride 1: a view where the tensor is contiguous, otherwise a copy."""
    flat = x.contiguous().reshape(-1)
    # A tensor of at most one element is contiguous with any stride.
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,), flat.storage_offset())


def combine(parts: Sequence[Tensor], outs: Sequence[Tensor], fold: Fold = torch.add) -> float:
    """Write the parts' sum, or another fold of them, in their order, to all of `outs`, which may be the parts.

    16-bit terms are added in float32, and the sum is rounded once.

    Returns:
        The sum of the elements of a sum of floats; otherwise 0.
    """
    n, seen = len(parts[0]), []
    step, sums = max(1, _CHUNK_BYTES // parts[0].element_size()), fold is torch.add and parts[0].is_floating_point()
    wide = torch.float64 if parts[0].dtype is torch.float64 else torch.float32
    for at in range(0, n, step):
        first, *rest = (part[at : at + step] for part in parts)
        to, *others = (out[at : at + step] for out in outs)
        if not rest:
            to.copy_(first)
        elif len(rest) == 1:
            total = fold(first, rest[0], out=to)
        else:
            total = fold(devices.widened(first) if sums else first, rest[0])
            for part in rest[1:]:
                fold(total, part, out=total)
            to.copy_(total)
        for out in others:
            out.copy_(to)
        if sums:  # while it is in the cache
            seen.append(to.sum(dtype=wide))
    return float(torch.stack(seen).sum()) if seen else 0.0


def copy_all(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Fill a contiguous tensor with the parts, one after the other."""
    flat, at = out.view(-1), 0
    for part in parts:
        flat[at : at + len(part)].copy_(part)
        at += len(part)
