"""The one message of an iteration in a generic Join."""

from __future__ import annotations

import torch

from ._axis import Work
from ._mesh import Mesh
from .transforms.sync._lane import MASK_BITS


class Roll:
    """One iteration's message: which ranks have input, and which of them synchronise gradients in it."""

    def __init__(self, mesh: Mesh, device: torch.device, live: bool = False, syncs: bool = False) -> None:
        words = -(-mesh.size // MASK_BITS)
        self._words = torch.zeros(2, words, device=device)
        here, bit = mesh.rank // MASK_BITS, float(2 ** (mesh.rank % MASK_BITS))
        self._words[0, here], self._words[1, here] = live * bit, syncs * bit
        self._work: Work | None = mesh.reduce_(self._words, tuple(mesh.shape))
        self._read: tuple[tuple[int, ...], ...] = ()

    def wait(self) -> tuple[int, ...]:
        """The ranks that have input."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._read = tuple(_ranks(masks) for masks in self._words.tolist())
        return self._read[0]

    def syncing(self) -> tuple[int, ...]:
        """Those of them that synchronise gradients."""
        self.wait()
        return self._read[1]


def _ranks(masks: list[float]) -> tuple[int, ...]:
    return tuple(
        i * MASK_BITS + bit for i, mask in enumerate(masks) for bit in range(MASK_BITS) if int(mask) >> bit & 1
    )
