"""Copies of many tensors in few operations."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

_SMALL = 1 << 16  # elements; a larger one has memory of its own, which is freed once it is written


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[torch.dtype | None, list[str]]:
    """The names of small tensors by their dtype, and of others under None."""
    found: dict[torch.dtype | None, list[str]] = {}
    for name, value in tensors.items():
        found.setdefault(value.dtype if value.dim() and value.numel() <= _SMALL else None, []).append(name)
    return found


class Copies:
    """Copies of tensors, on the CPU. Small ones of one dtype are copied into one tensor.

    Args:
        tensors: Those to copy, by name.
        kinds: For each, the dtype if it is small, or None.
        later: The names of those that stay as they are until `done`; they are copied by `tensors`, in another thread.

    Attributes:
        done: Set once nothing is left to be copied.
    """

    @torch.no_grad()
    def __init__(
        self, tensors: Mapping[str, Tensor], kinds: Mapping[torch.dtype | None, Sequence[str]], later: Collection[str]
    ) -> None:
        self._order, self.done = tensors.keys(), threading.Event()
        self._later, self._alone, self._small = dict[str, Tensor](), dict[str, Tensor](), []
        once: dict[int, Tensor] = {}  # such as a count of steps that all parameters share
        for name in kinds.get(None, ()):
            value = tensors[name]
            if name in later and value.dim() and value.device.type == "cpu":
                self._later[name] = value
                continue
            if id(value) not in once:
                once[id(value)] = value.to("cpu", copy=True)
            self._alone[name] = once[id(value)]
        for dtype, names in kinds.items():
            if dtype is not None:
                some = [*map(tensors.__getitem__, names)]
                self._small.append((names, some, torch.cat([value.reshape(-1) for value in some]).cpu()))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The copies by name, all of them made. Views are made here, and not while the run waits."""
        try:
            found = self._alone | {name: value.clone() for name, value in self._later.items()}
        finally:
            self.release()
        for names, some, flat in self._small:
            parts = flat.split([value.numel() for value in some])
            found |= {name: part.view(v.shape) for name, v, part in zip(names, some, parts, strict=True)}
        self._small, self._alone = [], {}
        return {name: found[name] for name in self._order}

    def release(self) -> None:
        """End the wait; what has not been copied is given up."""
        self._later = {}
        self.done.set()
