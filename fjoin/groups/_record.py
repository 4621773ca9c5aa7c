"""The record: what the ranks agree on, as a few named scalars of each rank that are summed in one message.

Its senders are the step and its loops (`reducer/_lane.py`, `training/_step.py`, `uneven/_loop.py`), registered modules
(`ddp/_weighted_sum.py`, `ddp/_unused_params.py`) and Join (`uneven/_join.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ..transforms._axis_env import Done, Work, bind_axes
from ..transforms._lane import mask_words, rank_bit, ranks_in
from ..transforms._tree import to_device
from ..transforms.axes._collectives import axis_index
from ._mesh import Mesh


class Record:
    """Scalars of this rank that are being summed over some axes. The first look at the sums waits for the message.

    Args:
        axes: The axes; there may be none.
        values: Name -> number. The same names on all ranks, in the same order.
        flags: Name -> whether this rank sets its flag. Each takes a bit for each rank, so that the ranks are known.
        small: Whether the sums are whole numbers below 2^24, which are sent in float32; otherwise in float64.
        device: The device of the message; by default that of the mesh's small messages.
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: tuple[str, ...],
        values: Mapping[str, float],
        flags: Mapping[str, bool | float] | None = None,
        small: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._names, own = list(values), list(values.values())
        if flags:
            ranks = math.prod(axis.size for axis in mesh.over(axes))
            with bind_axes(mesh.axes):
                here, bit = rank_bit(int(axis_index(axes)) if axes else 0)
            for name, flag in flags.items():
                self._names += flag_words(name, ranks)
                own += [flag * bit if word == here else 0.0 for word in range(mask_words(ranks))]
        words = torch.tensor(own, dtype=torch.float32 if small else torch.float64)
        self._words = to_device(mesh.device if device is None else device, words)
        self._work: Work = mesh.reduce_(self._words, axes) if axes else Done()
        self._sums: dict[str, float] | None = None

    def wait(self) -> dict[str, float]:
        """Name -> sum; of each flag its words, named by `flag_words`."""
        if self._sums is None:
            work, self._work = self._work, Done()  # which holds connections
            work.wait()
            self._sums = dict(zip(self._names, self._words.tolist(), strict=True))
        return self._sums

    def __getitem__(self, name: str) -> float:
        """The sum of a scalar."""
        return self.wait()[name]

    def ranks(self, flag: str) -> tuple[int, ...]:
        """The ranks that have set a flag."""
        sums = self.wait()
        return ranks_in([sums[name] for name in self._names if name.startswith(flag)])


def flag_words(flag: str, ranks: int) -> Sequence[str]:
    """The names of the words that hold a flag of these ranks."""
    return [f"{flag}{i}" for i in range(mask_words(ranks))]
