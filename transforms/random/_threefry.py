"""Threefry-2x32, a function of a key and a counter, in int32 tensors that hold the bits of unsigned words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Two words for each counter.

    Args:
        key: (2,) int32.
        high, low: The words of the counters, int32, of one shape.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with 20 rounds.
    """
    first, second = key.unbind(-1)
    words = (first, second, first ^ second ^ _PARITY)
    x, y = high + words[0], low + words[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = x + y
            y = ((y << by) | ((y >> (32 - by)) & ((1 << by) - 1))) ^ x  # >> copies the sign
        x, y = x + words[(i + 1) % 3], y + (words[(i + 2) % 3] + (i + 1))
    return x, y


def counters(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The words of the numbers 0, 1, ... in a shape, row by row."""
    count = math.prod(shape)
    if count < 2**31:
        low = torch.arange(count, dtype=torch.int32, device=device).reshape(tuple(shape))
        return torch.zeros_like(low), low
    number = torch.arange(count, dtype=torch.int64, device=device).reshape(tuple(shape))
    return word(number >> 32), word(number)


def word(number: Tensor) -> Tensor:
    """The last 32 bits of whole numbers, as int32."""
    last = number.to(torch.int64) & 0xFFFFFFFF
    return (last - ((last & 0x80000000) << 1)).to(torch.int32)


def word_of(number: int, device: torch.device | str) -> Tensor:
    """The last 32 bits of a number of the host, 0-d int32; the device gets it with a launch, without a copy."""
    last = number & 0xFFFFFFFF
    return torch.full((), last - ((last & 0x80000000) << 1), dtype=torch.int32, device=device)


def unsigned(x: Tensor) -> Tensor:
    """Words as numbers from 0 to 2^32 - 1, int64."""
    return x.to(torch.int64) & 0xFFFFFFFF
