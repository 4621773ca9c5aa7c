"""Tensors as 1-d values, for messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flat_view(x: Tensor) -> Tensor:
    """The values, 1-d with stride 1: a view where the tensor is contiguous, otherwise a copy."""
    flat = x.contiguous().reshape(-1)
    # A tensor of at most one element is contiguous with any stride.
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,), flat.storage_offset())


def flat_of(x: Tensor) -> Tensor:
    """`flat_view` of a tensor that the backend can send.

    Writes into it do not count as changes for autograd, as with every backend of torch.distributed.
    """
    if x.device.type != "cpu" or x.layout is not torch.strided:
        raise RuntimeError(
            f"the backend 'fjoin' sends dense tensors on the CPU, got {x.layout} on {x.device}; use gloo"
        )
    return flat_view(x.data)


def cat_flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([flat_of(part) for part in parts])


def fill(out: Tensor, flat: Tensor) -> None:
    values, out = flat.view(out.shape), out.data
    for dim, stride in enumerate(out.stride()):
        if stride == 0 and out.shape[dim] > 1:  # expanded: one place for all, which holds them only if they are equal
            first = values.narrow(dim, 0, 1)
            if bool(((values == first) | (values != values)).all()):
                values, out = first, out.narrow(dim, 0, 1)
    out.copy_(values)


def check_dtypes(call: str, outs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise RuntimeError, as gloo does, where values would be converted on their way."""
    other = next((out.dtype for out in outs if out.dtype is not dtype), None)
    if other is not None:
        raise RuntimeError(f"{call} of {dtype} got a tensor of {other}; all tensors of a call must have one dtype")


def give_back(flat: Tensor, x: Tensor) -> None:
    """Copy values back to a tensor that `flat_of` could not view."""
    if flat.data_ptr() != x.data_ptr():
        fill(x, flat)


def row_sizes(x: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """The elements for each rank, from rows."""
    rows = len(x) if x.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(f"all_to_all among {ranks} ranks cannot split {rows} rows evenly")
        return [x.numel() // ranks] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"all_to_all among {ranks} ranks cannot split {rows} rows into {list(sizes)}")
    row = x.numel() // max(rows, 1)
    return [size * row for size in sizes]
