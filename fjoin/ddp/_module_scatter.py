"""The sharded sum of one of a module's buckets."""

from __future__ import annotations

import torch

from ..transforms._axis_env import Axis
from ..transforms._sums import sum_of_pieces
from ._buckets import DDPBucket


class ModuleScatter:
    """The message of one bucket: each rank sends every other rank the slices that this one owns.

    The slices of a rank travel in the order of the module's bucket.
    """

    def __init__(self, out: DDPBucket, axis: Axis) -> None:
        assert out.pieces is not None
        self._out, self._rank = out, out.pieces.rank
        grads = {path: grad.reshape(-1) for path, grad in out.by_path().items()}
        parts = [
            [grads[path][start:stop] for path in out.bucket.paths for start, stop in (slices[path],) if stop]
            for slices in out.pieces.slices_of_all
        ]
        empty = out.grads[:0]
        self._own = torch.cat([empty, *parts[self._rank]])
        give, take = [sum(map(len, of)) for of in parts], [len(self._own)] * len(parts)
        give[self._rank] = take[self._rank] = 0
        sent = torch.cat([empty, *(part for rank, of in enumerate(parts) if rank != self._rank for part in of)])
        self._received = axis.begin("all_to_all_single", sent, (tuple(give), tuple(take)))

    def wait(self) -> None:
        """Add the slices."""
        self._out.scatter(sum_of_pieces(self._received(), len(self._own), self._own, self._rank))
