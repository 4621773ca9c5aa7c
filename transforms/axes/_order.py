"""Floats as integers of the same order: backends differ in what the larger of a number and NaN is, but not of two integers."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_order(x: Tensor, nan_is_largest: bool) -> Tensor:
    """Integers in the order of these floats, NaN at one end; what is no float stays as it is. Of 16 bits and less as of 32."""
    if not x.is_floating_point():
        return x
    wide = x.detach() if x.dtype in _INTEGERS else x.detach().float()
    integers = _INTEGERS[wide.dtype]
    end = torch.iinfo(integers).max if nan_is_largest else torch.iinfo(integers).min
    return torch.where(wide.isnan(), end, _swapped(wide.view(integers)))


def from_order(order: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of `to_order`; both its ends are bits of a NaN."""
    if not dtype.is_floating_point:
        return order
    wide = torch.float64 if order.dtype is torch.int64 else torch.float32
    return _swapped(order).view(wide).to(dtype)


def _swapped(bits: Tensor) -> Tensor:
    """Negative floats have a sign and a size, which grows the other way."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
