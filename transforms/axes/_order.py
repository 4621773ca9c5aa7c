"""Floats as integers of the same order: backends differ in the maximum of a number and NaN, but not of two integers."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_order(x: Tensor, nan_is_largest: bool) -> Tensor:
    """Integers in the order of these floats, with NaN at one end and at least 32 bits; other dtypes are unchanged."""
    if not x.is_floating_point():
        return x
    wide = x.detach() if x.dtype in _INTEGERS else x.detach().float()
    integers = _INTEGERS[wide.dtype]
    end = torch.iinfo(integers).max if nan_is_largest else torch.iinfo(integers).min
    return torch.where(wide.isnan(), end, _swapped(wide.view(integers)))


def from_order(order: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_order`; both ends of the integers are the bits of a NaN."""
    if not dtype.is_floating_point:
        return order
    wide = torch.float64 if order.dtype is torch.int64 else torch.float32
    return _swapped(order).view(wide).to(dtype)


def _swapped(bits: Tensor) -> Tensor:
    """Bits with the order of negative numbers reversed: floats store a sign and a magnitude."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
