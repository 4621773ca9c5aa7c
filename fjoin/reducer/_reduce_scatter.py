"""The sharded reduction: of each bucket every rank gets the sum of its own piece; the lane travels alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..groups._axis import Received, Work
from ..groups._host_axis import HostAxis
from ..groups._malloc import keep_freed
from ..shared_memory._exchange import Exchange
from ..transforms._axis_env import Axis
from ..transforms._sums import sum_in_order
from ..transforms.layout._pieces import bind_pieces
from ._all_reduce import AllReduceHook
from ._buckets import GradBuffer
from ._flat_params import Storage
from ._lane import StepLane


class ReduceScatterHook(AllReduceHook):
    """Runs a hook that begins with `scatter_mean` and contains no further reduction."""

    carries_lane = False

    def init(self, storage: Storage) -> Any:
        """The initial state."""
        keep_freed()
        with bind_pieces(storage.pieces):
            return super().init(storage)

    def start(self, state: Any, storage: Storage, lane: StepLane, values: dict[str, Any], step: int) -> None:
        self._under_way: list[Scatter | HostScatter] = []
        super().start(state, storage, lane, values, step)

    def launch(self, index: int, out: GradBuffer) -> Work:
        while self._under_way and self._under_way[0].arrived():  # so that its gradients can be freed
            self._under_way.pop(0).wait()
        axis = self._mesh.axes[self._axes[0]]
        shared = isinstance(axis, HostAxis) and out.buffer.device.type == "cpu"
        self._under_way.append(HostScatter(out, axis) if shared else Scatter(out, axis))
        return self._under_way[-1]

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._under_way = []
        super().stop()

    def observed(self, outgoing: list[GradBuffer]) -> None:
        """Share the verdict and the norm of the pieces, where the messages have not told them."""
        told = all(out.total is not None and math.isfinite(out.total) for out in outgoing)  # the same on all ranks
        if told and outgoing and not self._step_check.norm:
            self._step_check.pieces_are_finite(self._mesh.axes[self._axes[0]])
            return
        self._step_check.share(outgoing, self._mesh.axes[self._axes[0]])


class HostScatter:
    """The message of one bucket between ranks of one host: each sums its own piece in place.

    Attributes:
        total: After the wait: the sum of the elements of all pieces.
    """

    def __init__(self, out: GradBuffer, axis: HostAxis) -> None:
        assert out.pieces is not None
        pieces = out.pieces
        self._bounds = pieces.bounds[0][pieces.rank : pieces.rank + 2]
        self._out = out
        self._work: Exchange | None = axis.scatter_(out.buffer, pieces.bounds[0])
        self.total: float | None = None

    def arrived(self) -> bool:
        """Whether a wait would not wait."""
        return self._work is None or self._work.arrived()

    def wait(self) -> None:
        """Wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self.total = self._work.total if self._out.buffer.is_floating_point() else None
            self._work = None
            start, stop = self._bounds
            self._out.scatter(self._out.buffer[start:stop])


class Scatter:
    """The message of one bucket: each rank sends every other rank the piece that this one owns."""

    def __init__(self, out: GradBuffer, axis: Axis) -> None:
        assert out.pieces is not None
        pieces, flat = out.pieces, out.buffer
        start, stop = pieces.bounds[0][pieces.rank : pieces.rank + 2]
        give, take = list(pieces.sizes(0)), [stop - start] * pieces.ranks
        # The own part does not travel where the parts for the others are adjacent.
        stays = pieces.rank in (0, pieces.ranks - 1)
        self._out, self._own = out, flat[start:stop] if stays else None
        self._rank, self._length = pieces.rank, stop - start
        if stays:
            flat = flat[stop:] if pieces.rank == 0 else flat[:start]
            give[pieces.rank] = take[pieces.rank] = 0
        self._received: Any = axis.begin("all_to_all_single", flat, (tuple(give), tuple(take)))

    def arrived(self) -> bool:
        """Whether all pieces have arrived."""
        return isinstance(self._received, Received) and self._received.arrived()

    def wait(self) -> None:
        """Add the pieces; no gradient of this bucket is needed after that."""
        if self._received is None:
            return
        received, own, self._received, self._own = self._received(), self._own, None, None
        self._out.scatter(sum_of_pieces(received, self._length, own, self._rank))
        if self._out.direct:
            self._out.buffer = self._out.grads


def sum_of_pieces(received: Tensor, length: int, own: Tensor | None, rank: int) -> Tensor:
    """The sum of the ranks' pieces in the order of the ranks, bit for bit that of an ordered reduction.

    It lies in memory of its own, or in that of the received pieces, so that the memory of `own` can be freed.

    Args:
        received: The pieces one after the other, without that of this rank where that is `own`; they are overwritten.
        length: The elements of a piece.
        own: This rank's piece, where it has not travelled; the sum may be written there.
    """
    rows = list(received.split(length)) if received.numel() else []
    if own is not None:
        rows.insert(rank, own)
    if not rows:
        return received
    if len(rows) == 2:  # of two ranks
        return torch.add(*rows, out=rows[0] if rows[1] is own else rows[1])
    return sum_in_order(rows)
