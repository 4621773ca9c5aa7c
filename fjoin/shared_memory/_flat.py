"""Tensors as 1-d values, for messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flat_of(x: Tensor) -> Tensor:
    """The values, 1-d: a view where the tensor is contiguous, otherwise a copy."""
    if x.device.type != "cpu" or x.layout is not torch.strided:
        raise RuntimeError(
            f"the backend 'fjoin' sends dense tensors on the CPU, got {x.layout} on {x.device}; use gloo"
        )
    return x.detach().reshape(-1)


def cat_flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([flat_of(part) for part in parts])


def fill(out: Tensor, flat: Tensor) -> None:
    out.detach().copy_(flat.view(out.shape))


def give_back(flat: Tensor, x: Tensor) -> None:
    """Copy values back to a tensor that `flat_of` could not view."""
    if flat.data_ptr() != x.data_ptr():
        fill(x, flat)


def row_sizes(x: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """The elements for each rank, from rows."""
    if not sizes:
        if (len(x) if x.dim() else 1) % ranks:
            raise ValueError(f"all_to_all among {ranks} ranks cannot split {len(x)} rows evenly")
        return [flat_of(x[:0]).numel() if not x.numel() else flat_of(x).numel() // ranks] * ranks
    row = flat_of(x).numel() // max(len(x), 1)
    return [size * row for size in sizes]
