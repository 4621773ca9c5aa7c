"""Codecs of few bits, with a scale for every block of elements.

A block is what has one scale: the largest absolute value in it becomes the largest code. A value that is not
finite makes the scale so, and with it the whole block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._spec import factory
from ._codec import Codec, as_bytes, read


def _scaled(
    block: int, largest: float, pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor, int], Tensor],
    packed: Callable[[int], int],
) -> Codec:  # fmt: skip
    """A codec of scales in float32, followed by codes.

    Args:
        largest: The largest code.
        pack: (rows, n) codes, as floats that may have fractions, -> (rows, packed(n)) uint8.
        unpack: The same back, exactly, as float32.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a whole number, at least 1, got {block!r}")

    def blocks(n: int) -> int:
        return -(-n // block)

    def in_blocks(x: Tensor) -> Tensor:
        """(rows, blocks, elements), zeros behind the last row's end."""
        n = x.shape[1]
        size = min(block, n)
        if short := blocks(n) * size - n:
            x = torch.nn.functional.pad(x, (0, short))
        return x.unflatten(1, (blocks(n), size))

    def encode(x: Tensor) -> Tensor:
        n = x.shape[1]
        if n == 0:
            return x.new_zeros(x.shape[0], 0, dtype=torch.uint8)
        cut = in_blocks(x)
        scale = torch.linalg.vector_norm(cut, math.inf, dim=2) / largest
        inverse = 1 / scale
        inverse = torch.where(torch.isfinite(inverse) & torch.isfinite(scale), inverse, torch.zeros_like(scale))
        codes = torch.nan_to_num((cut * inverse.unsqueeze(2)).flatten(1)[:, :n], nan=0.0)
        return torch.cat([as_bytes(scale), pack(codes)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        if n == 0:
            return data.new_zeros(data.shape[0], 0, dtype=torch.float32)
        scale = read(data[:, : 4 * blocks(n)], torch.float32)
        cut = in_blocks(unpack(data[:, 4 * blocks(n) :], n))
        return (cut * scale.unsqueeze(2)).flatten(1)[:, :n]

    return Codec(encode, decode, lambda n: 4 * blocks(n) + packed(n))


@factory
def int8(block: int = 256) -> Codec:
    """One byte: 255 steps between the largest absolute value of a block and its negative.

    The error is at most 1 / 254 of that value. Bytes per element: 1 + 4 / block.

    Args:
        block: Elements that share a scale, at least 1.

    Raises:
        ValueError: `block` is no whole number above 0.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, section 2.1, with equal
        steps.

    >>> codec, x = int8(), torch.tensor([[127.0, -3.2, 0.4]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[127.,  -3.,   0.]]), 7)
    """

    def pack(codes: Tensor) -> Tensor:
        return codes.round().to(torch.int8).view(torch.uint8)

    def unpack(data: Tensor, n: int) -> Tensor:
        return read(data, torch.int8).to(torch.float32)

    return _scaled(block, 127.0, pack, unpack, lambda n: n)


@factory
def int4(block: int = 64) -> Codec:
    """Half a byte: 15 steps. Bytes per element: 1/2 + 4 / block; an odd element has a byte of its own.

    Args:
        block: Elements that share a scale, at least 1.

    Raises:
        ValueError: `block` is no whole number above 0.

    >>> codec, x = int4(), torch.tensor([[7.0, -3.2, 0.4]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[ 7., -3.,  0.]]), 6)
    """

    def pack(codes: Tensor) -> Tensor:
        nibbles = (codes.round() + 8).to(torch.uint8)
        if nibbles.shape[1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)

    def unpack(data: Tensor, n: int) -> Tensor:
        both = torch.stack([data & 15, data >> 4], dim=2).flatten(1)[:, :n]
        return both.to(torch.float32) - 8

    return _scaled(block, 7.0, pack, unpack, lambda n: (n + 1) // 2)


# Largest finite value.
_FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@factory
def fp8(block: int = 256, dtype: torch.dtype = torch.float8_e4m3fn) -> Codec:
    """One byte, a small float: three or two bits of fraction, and a scale for each block.

    Args:
        block: Elements that share a scale, at least 1.
        dtype: torch.float8_e4m3fn, an error of at most 1 / 16 of each value, or torch.float8_e5m2, 1 / 8 and a wider range.

    Raises:
        ValueError: `block` is no whole number above 0; another dtype.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.

    >>> codec, x = fp8(), torch.tensor([[448.0, -3.2, 9.0]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[448.0000,  -3.2500,   9.0000]]), 7)
    """
    if dtype not in _FP8:
        raise ValueError(f"dtype must be one of {sorted(map(str, _FP8))}, got {dtype!r}")

    def pack(codes: Tensor) -> Tensor:
        return codes.to(dtype).view(torch.uint8)

    def unpack(data: Tensor, n: int) -> Tensor:
        return read(data, dtype).to(torch.float32)

    return _scaled(block, _FP8[dtype], pack, unpack, lambda n: n)
