"""The roll of a Join: one small message in each iteration, with the ranks that have input."""

from __future__ import annotations

import torch

from ..agreement._record import Record, Sums
from ..groups._mesh import Mesh

# The flags of an iteration's record.
_LIVE, _SYNCS = "has input", "synchronises"


class Roll:
    """The ranks that have input, and those that synchronise gradients, in the last iteration of this rank.

    Attributes:
        now: The message of that iteration, which may be under way.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        axes, flags = tuple(mesh.shape), (_LIVE, _SYNCS)
        self._record = Record(mesh, axes, (), flags, small=True, device=device)
        self.now: Sums | None = None

    def _send(self, live: bool = False, syncs: bool = False) -> Sums:
        """Start an iteration's message: the ranks that have input, and those that synchronise gradients in it."""
        return self._record.send(self._record.flagged(self._record.flagged({}, _LIVE, live), _SYNCS, syncs))

    def call(self, syncs: bool) -> None:
        """Begin an iteration with input."""
        self.now = self._send(live=True, syncs=syncs)

    def call_without_input(self) -> tuple[int, ...]:
        """Begin an iteration without input: the ranks that have some. Where none has, there is no iteration."""
        sums = self._send()
        live = sums.ranks(_LIVE)
        if live:
            self.now = sums
        return live

    def live(self) -> tuple[int, ...]:
        return self.now.ranks(_LIVE) if self.now is not None else ()

    def syncing(self) -> tuple[int, ...]:
        return self.now.ranks(_SYNCS) if self.now is not None else ()
