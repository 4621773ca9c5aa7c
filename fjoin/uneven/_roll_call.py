"""The one message of an iteration in a generic Join."""

from __future__ import annotations

import torch

from ..groups._axis import Work
from ..groups._mesh import Mesh
from ..transforms._lane import mask_words, rank_bit, ranks_in
from ..transforms._tree import to_device


class PresenceMessage:
    """One iteration's message: the ranks that have input, and those that synchronise gradients in it."""

    def __init__(self, mesh: Mesh, device: torch.device, live: bool = False, syncs: bool = False) -> None:
        words = torch.zeros(2, mask_words(mesh.size), dtype=torch.float32)
        here, bit = rank_bit(mesh.rank)
        words[0, here], words[1, here] = live * bit, syncs * bit
        self._words = to_device(device, words)
        self._work: Work | None = mesh.reduce_(self._words, tuple(mesh.shape))
        self._read: tuple[tuple[int, ...], ...] = ()

    def wait(self) -> tuple[int, ...]:
        """The ranks that have input; waits for the message."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._read = tuple(ranks_in(masks) for masks in self._words.tolist())
        return self._read[0]

    def syncing(self) -> tuple[int, ...]:
        """The ranks with input that synchronise gradients."""
        self.wait()
        return self._read[1]
