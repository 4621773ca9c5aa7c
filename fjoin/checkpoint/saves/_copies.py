"""Copies of many tensors in few operations."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SMALL = 1 << 16  # elements; a larger one has memory of its own, which is freed once it is written


class Kind(NamedTuple):
    """How a tensor is copied."""

    dtype: torch.dtype | None  # of small ones, which are copied into one tensor
    stays: bool  # until all copies have been made, so that another thread can copy it


def kinds_of(tensors: Mapping[str, Tensor], stay: Collection[str]) -> dict[Kind, list[str]]:
    """The names of tensors by their kind.

    Args:
        stay: The names of those that stay as they are until all copies have been made.
    """
    found: dict[Kind, list[str]] = {}
    for name, value in tensors.items():
        small = value.dim() and value.numel() <= _SMALL
        stays = name in stay and value.device.type == "cpu"  # on a device, other threads have other streams
        found.setdefault(Kind(value.dtype if small else None, stays), []).append(name)
    return found


class Copies:
    """Copies of tensors, on the CPU: of those that do not stay at once, of others by `tensors`, in another thread.

    Attributes:
        done: Set once nothing is left to be copied.
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], kinds: Mapping[Kind, Sequence[str]]) -> None:
        self._tensors, self.done = tensors, threading.Event()
        self._alone, self._small = dict[str, Tensor](), list[_Small]()
        self._later = {kind: names for kind, names in kinds.items() if kind.stays}
        for kind, names in kinds.items():
            if not kind.stays:
                self._copy(kind, names)

    def _copy(self, kind: Kind, names: Sequence[str]) -> None:
        some = [*map(self._tensors.__getitem__, names)]
        if kind.dtype is not None:
            shapes = [value.shape for value in some]
            self._small.append(_Small(names, shapes, torch.cat([value.reshape(-1) for value in some]).cpu()))
            return
        once: dict[int, Tensor] = {}  # such as a count of steps that all parameters share
        for name, value in zip(names, some, strict=True):
            if id(value) not in once:
                once[id(value)] = value.to("cpu", copy=True)
            self._alone[name] = once[id(value)]

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The copies by name, all of them made. Views are made here, and not while the run waits."""
        try:
            for kind, names in self._later.items():
                self._copy(kind, names)
        finally:
            order = self._tensors.keys()
            self.release()
        found = self._alone
        for names, shapes, flat in self._small:
            parts = flat.split([shape.numel() for shape in shapes])
            found |= {name: part.view(shape) for name, shape, part in zip(names, shapes, parts, strict=True)}
        self._small, self._alone = [], {}
        return {name: found[name] for name in order}

    def release(self) -> None:
        """End the wait; what has not been copied is given up."""
        self._later, self._tensors = {}, {}
        self.done.set()


class _Small(NamedTuple):
    """Small tensors of one dtype in one."""

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    flat: Tensor
