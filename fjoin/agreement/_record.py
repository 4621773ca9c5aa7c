"""The record: what the ranks agree on, as a few named scalars of each rank that are summed in one message.

Its senders are steps (`agreement/_step_record.py`), their loops (`training/_in_loop.py`, `uneven/_loop.py`), Join
(`uneven/_roll.py`) and registered modules (`ddp/_unused_params.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh
from ..transforms._axis_env import Work, bind_axes
from ..transforms.axes._collectives import axis_index
from ..transforms.transform._lane import (
    decode_words,
    encode_lane,
    host_lane,
    host_words,
    mask_words,
    rank_bit,
    ranks_in,
    words_per_scalar,
)
from ..transforms.tree._tree import to_device
from ._device_reads import numbers, read_now


class Record:
    """Named scalars that ranks sum over some axes. A flag takes a bit for each rank, so that the ranks are known.

    Attributes:
        axes: The axes; there may be none.
        ranks: The number of ranks along them.
        names: The names of the scalars, in the order in which they travel.
        dtype, device: Those of a message of its own.

    Args:
        names: The names of the scalars; the same on all ranks, in the same order.
        flags: The names of the flags.
        small: Whether the sums are whole numbers below 2^24, which take one word of float32 each.
        device: The device of its messages; by default that of the mesh's small messages.
    """

    axes: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device

    def __init__(
        self,
        mesh: Mesh,
        axes: tuple[str, ...],
        names: Sequence[str],
        flags: Sequence[str] = (),
        small: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.mesh: Mesh = mesh
        self.axes, self._small = axes, small
        self.ranks: int = math.prod(axis.size for axis in mesh.over(axes))
        with bind_axes(mesh.axes):
            self._word, self._bit = rank_bit(int(axis_index(axes)) if axes else 0)
        self.names: tuple[str, ...] = (*names, *(word for flag in flags for word in flag_words(flag, self.ranks)))
        self.dtype, self.device = torch.float32 if small else torch.float64, device or mesh.device

    @property
    def n_words(self) -> int:
        """The number of elements of a message."""
        return len(self.names) * (1 if self._small else words_per_scalar(self.dtype))

    def flagged(self, values: Mapping[str, Any], flag: str, on: Any = 1.0) -> dict[str, Any]:
        """The values, with this rank's bit of a flag also set where `on` is 1."""
        name = f"{flag}{self._word}"
        old = values.get(name, 0.0)
        if not isinstance(on, Tensor):
            return {**values, name: max(float(old), on * self._bit)}
        new = on * self._bit
        if isinstance(old, Tensor):
            return {**values, name: torch.maximum(to_device(on.device, old, on.dtype), new)}
        return {**values, name: torch.clamp(new, min=old) if old else new}

    def write(self, values: Mapping[str, Any], words: Tensor) -> None:
        """Write this rank's values into the words of a message; names that `values` lacks are 0."""
        words.copy_(self._words(values, words.dtype, words.device))

    def _words(self, values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's values as words; on the CPU where the host knows all of them, without a wait for a device."""
        own = [values.get(name, 0.0) for name in self.names]
        if not self._small:
            if device.type != "cpu" or Tensor in map(type, own):
                return encode_lane(dict(zip(self.names, own, strict=True)), dtype, self.ranks, device)
            own = host_words(self.names, own, dtype, self.ranks)
        return torch.tensor(own, dtype=dtype)

    def read(self, words: Tensor, as_tensors: bool = False) -> dict[str, Any]:
        """The sums by name: numbers where the host may read the words without waiting, otherwise tensors.

        Args:
            as_tensors: Return tensors in any case.
        """
        if self._small:
            return dict(zip(self.names, words.tolist(), strict=True))
        if words.device.type != "cpu" or as_tensors:
            return dict(zip(self.names, decode_words(words.clone(), self.ranks).unbind(0), strict=True))
        return dict(host_lane(words.tolist(), self.names, words.dtype, self.ranks))

    def send(self, values: Mapping[str, Any]) -> Sums:
        """Start summing this rank's values in a message of their own."""
        if not self.axes and not any(isinstance(value, Tensor) for value in values.values()):
            return Sums(self, known={name: float(values.get(name, 0.0)) for name in self.names})
        words = self._words(values, self.dtype, self.device).to(self.device)
        return Sums(self, words, self.mesh.reduce_(words, self.axes))


class Sums:
    """The sums of a record, whose message may be under way. The first look waits for it."""

    def __init__(
        self,
        record: Record,
        words: Tensor | None = None,
        work: Work | None = None,
        known: dict[str, float] | None = None,
    ) -> None:
        self._record, self._words, self._work, self._known = record, words, work, known

    def wait(self) -> dict[str, float]:
        """The sums by name, as numbers."""
        if self._known is None:
            self._known = numbers(self.read(), partial(read_now, self._record.mesh))
        return self._known

    def read(self, as_tensors: bool = False) -> dict[str, Any]:
        """The sums by name, see `Record.read`."""
        if self._words is None:
            known = self.wait()
            return (
                {name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()}
                if as_tensors
                else known
            )
        work, self._work = self._work, None  # which holds connections
        if work is not None:
            work.wait()
        return self._record.read(self._words, as_tensors)

    def __getitem__(self, name: str) -> float:
        """The sum of a scalar."""
        return self.wait()[name]

    def ranks(self, flag: str) -> tuple[int, ...]:
        """The ranks that have set a flag."""
        sums = self.wait()
        return ranks_in([sums[name] for name in flag_words(flag, self._record.ranks)])


def flag_words(flag: str, ranks: int) -> list[str]:
    """The names of the words that hold a flag of these ranks."""
    return [f"{flag}{i}" for i in range(mask_words(ranks))]
