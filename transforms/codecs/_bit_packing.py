"""Packing small whole numbers into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def in_a_byte(base: int) -> int:
    """The number of digits of a base in a byte.

    >>> [in_a_byte(base) for base in (2, 3, 15, 255)]
    [8, 5, 2, 1]
    """
    count = 1
    while base ** (count + 1) <= 256:
        count += 1
    return count


def width(n: int, base: int) -> int:
    """Bytes of n digits."""
    return -(-n // in_a_byte(base))


def pack(digits: Tensor, base: int) -> Tensor:
    """Pack (rows, n) uint8 below `base` as (rows, width(n)); the digits of the first part of a row are the lowest."""
    count, base, n = in_a_byte(base), whole_bits(base), digits.shape[1]
    if count == 1:
        return digits
    parts = torch.nn.functional.pad(digits, (0, -n % count)).unflatten(1, (count, -1)).unbind(1)
    packed = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        packed = packed + part * base**i
    return packed


def unpack(data: Tensor, n: int, base: int) -> Tensor:
    """The inverse of `pack`: (rows, width(n)) -> (rows, n)."""
    count, base = in_a_byte(base), whole_bits(base)
    if count == 1:
        return data
    digits = []
    for _ in range(count):
        if base & (base - 1):
            quotient = torch.div(data, base, rounding_mode="floor")
            digits.append(data - quotient * base)
            data = quotient
        else:  # several times as fast
            digits.append(data & (base - 1))
            data = data >> (base.bit_length() - 1)
    return torch.cat(digits, dim=1)[:, :n]


def whole_bits(base: int) -> int:
    """The next power of two if a byte holds as many digits of it, the base itself otherwise."""
    power = 1 << (base - 1).bit_length()
    return power if in_a_byte(power) == in_a_byte(base) else base
