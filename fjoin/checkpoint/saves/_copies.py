"""Copies of many tensors in few operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SMALL = 1 << 16  # elements; a larger one has memory of its own, which is freed once it is written


class Copies:
    """Copies of tensors, on the CPU. Small ones of one dtype are copied into one tensor.

    Args:
        tensors: Those to copy, by name.
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._alone: dict[str, Tensor] = {}
        self._order, small = list(tensors), dict[tuple[torch.dtype, torch.device], list[str]]()
        once: dict[int, Tensor] = {}  # such as a count of steps that all parameters share
        for name, value in tensors.items():
            if value.dim() and value.numel() <= _SMALL:
                small.setdefault((value.dtype, value.device), []).append(name)
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

    def tensors(self) -> dict[str, Tensor]:
        """The copies by name. These views are made here, and not while the run waits."""
        found = self._alone
        for forms, flat in self._together:
            parts = flat.split([shape.numel() for _, shape in forms])
            found |= {name: part.view(shape) for (name, shape), part in zip(forms, parts, strict=True)}
        return {name: found[name] for name in self._order}
