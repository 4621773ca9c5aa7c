"""The sharded reduction: of each bucket every rank gets the sum of its own piece; the lane travels alone."""

from __future__ import annotations

from typing import Any

import torch

from ..groups._axis import GroupAxis, Work
from ..transforms._axis_env import Axis
from ..transforms.layout._pieces import bind_pieces
from ._all_reduce import AllReduceHook
from ._buckets import GradBuffer
from ._flat_params import Storage
from ._interleave import keep_freed


class ReduceScatterHook(AllReduceHook):
    """Runs a hook that begins with `scatter_mean` and contains no further reduction."""

    carries_lane = False

    def init(self, storage: Storage) -> Any:
        """The initial state."""
        keep_freed()
        with bind_pieces(storage.pieces):
            return super().init(storage)

    def launch(self, index: int, out: GradBuffer) -> Work:
        return Scatter(out, self._mesh.axes[self._axes[0]])

    def observed(self, outgoing: list[GradBuffer]) -> None:
        """Share the verdict and the norm of the pieces."""
        self._step_check.share(outgoing, self._mesh.axes[self._axes[0]])


class Scatter:
    """The message of one bucket: each rank sends every other rank the piece that this one owns."""

    def __init__(self, out: GradBuffer, axis: Axis) -> None:
        assert out.pieces is not None
        self._out, self._pieces = out, out.pieces
        pieces, flat = self._pieces, out.buffer
        start, stop = pieces.bounds[0][pieces.rank : pieces.rank + 2]
        give, take = list(pieces.sizes(0)), [stop - start] * pieces.ranks
        self._own, self._without_own = flat[start:stop], pieces.rank in (0, pieces.ranks - 1)
        if self._without_own:  # the parts for the others are adjacent
            flat = flat[stop:] if pieces.rank == 0 else flat[:start]
            give[pieces.rank] = take[pieces.rank] = 0
        arguments = ("all_to_all_single", flat, (tuple(give), tuple(take)))
        self._received = axis.begin(*arguments) if isinstance(axis, GroupAxis) else lambda: axis.run(*arguments)

    def wait(self) -> None:
        """Add the pieces in the order of the ranks, as an ordered sum of all would."""
        own, received = self._own, self._received()
        rows = list(received.split(own.numel())) if received.numel() else []
        if self._without_own:
            rows.insert(self._pieces.rank, own)
        total = rows[0] if rows else own
        for row in rows[1:]:
            total = torch.add(total, row, out=row if row is own else total)
        self._out.scatter(total)
