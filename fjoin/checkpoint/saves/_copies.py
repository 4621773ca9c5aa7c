"""Copies of many tensors in few operations."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

_SMALL = 1 << 16  # elements; a larger one has memory of its own, which is freed once it is written


class Copies:
    """Copies of tensors, on the CPU. Small ones of one dtype are copied into one tensor.

    Args:
        tensors: Those to copy, by name.
        later: The names of those that stay as they are until `wait`; they are copied by `tensors`, in another thread.
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], later: Collection[str]) -> None:
        self._order, self._later = list(tensors), dict[str, Tensor]()
        self._alone: dict[str, Tensor] = {}
        self._done, small = threading.Event(), dict[tuple[torch.dtype, torch.device], list[str]]()
        once: dict[int, Tensor] = {}  # such as a count of steps that all parameters share
        for name, value in tensors.items():
            if value.dim() and value.numel() <= _SMALL:
                small.setdefault((value.dtype, value.device), []).append(name)
            elif name in later and value.device.type == "cpu":
                self._later[name] = value
            else:
                if id(value) not in once:
                    once[id(value)] = value.to("cpu", copy=True)
                self._alone[name] = once[id(value)]
        self._together = [
            (
                [(name, tensors[name].shape) for name in names],
                torch.cat([tensors[name].reshape(-1) for name in names]).cpu(),
            )
            for names in small.values()
        ]

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The copies by name, all of them made. Views are made here, and not while the run waits."""
        try:
            found = self._alone | {name: value.clone() for name, value in self._later.items()}
        finally:
            self.release()
        for forms, flat in self._together:
            parts = flat.split([shape.numel() for _, shape in forms])
            found |= {name: part.view(shape) for (name, shape), part in zip(forms, parts, strict=True)}
        return {name: found[name] for name in self._order}

    def release(self) -> None:
        """End the wait; what has not been copied is given up."""
        self._later = {}
        self._done.set()

    def wait(self) -> None:
        """Wait until all are copied."""
        self._done.wait()
