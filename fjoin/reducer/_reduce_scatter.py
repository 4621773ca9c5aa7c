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
        sizes, rank = self._pieces.sizes(0), self._pieces.rank
        start, stop = self._pieces.bounds[0][rank : rank + 2]
        self._own = out.buffer[start:stop]
        arguments = ("all_to_all_single", out.buffer, (sizes, (stop - start,) * len(sizes)))
        self._received = axis.begin(*arguments) if isinstance(axis, GroupAxis) else lambda: axis.run(*arguments)

    def wait(self) -> None:
        """Add the pieces in the order of the ranks, as an ordered sum of all would."""
        own = self._own
        first, *others = self._received().view(self._pieces.ranks, own.numel()).unbind(0)
        if others:
            torch.add(first, others[0], out=own)
        for row in others[1:]:
            own.add_(row)
        self._out.scatter(own)
