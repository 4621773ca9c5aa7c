"""Codecs of few bits, with a scale for every block of elements.

A block is what has one scale: the largest absolute value in it becomes the largest code. A value that is not
finite makes the scale so, and with it the whole block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._spec import factory
from ._codec import Codec, as_bytes, read


def _same(codes: Tensor) -> Tensor:
    return codes


def _scaled(
    block: int,
    largest: float,
    code: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    pack: Callable[[Tensor], Tensor] = _same,
    unpack: Callable[[Tensor, int], Tensor] = lambda data, n: data,
    packed: Callable[[int], int] = lambda n: n,
) -> Codec:
    """A codec of scales in float32, followed by codes.

    Args:
        largest: The largest code's value.
        code: Values up to `largest`, which it may overwrite, to codes, uint8. Of a value that is not finite it may
            make anything.
        value: The other way round, to float32 in new memory.
        pack, unpack, packed: (rows, n) codes to (rows, packed(n)) bytes, and back, where codes have less than 8 bits.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a whole number, at least 1, got {block!r}")

    def encode(x: Tensor) -> Tensor:
        n = x.shape[1]
        whole = n // block * block
        scales, codes = [x.new_zeros(x.shape[0], 0)], [x.new_zeros(x.shape[0], 0, dtype=torch.uint8)]
        for piece, size in ((x[:, :whole], block), (x[:, whole:], n - whole)):
            if piece.shape[1]:
                cut = piece.unflatten(1, (-1, size))
                scale = torch.maximum(cut.amax(dim=2), -cut.amin(dim=2)) / largest
                inverse = 1 / scale
                inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(scale))
                scales.append(scale)
                codes.append(code((cut * inverse.unsqueeze(2)).flatten(1)))
        return torch.cat([as_bytes(torch.cat(scales, dim=1)), pack(torch.cat(codes, dim=1))], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        if n == 0:
            return data.new_zeros(data.shape[0], 0, dtype=torch.float32)
        blocks, size = -(-n // block), min(block, n)
        scale, codes = read(data[:, : 4 * blocks], torch.float32), unpack(data[:, 4 * blocks :], n)
        if short := blocks * size - n:
            codes = torch.nn.functional.pad(codes, (0, short))
        return value(codes).unflatten(1, (blocks, size)).mul_(scale.unsqueeze(2)).flatten(1)[:, :n]

    return Codec(encode, decode, lambda n: 4 * -(-n // block) + packed(n))


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

    return _scaled(
        block,
        127.0,
        lambda x: x.round_().to(torch.int8).view(torch.uint8),
        lambda codes: codes.view(torch.int8).to(torch.float32),
    )


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

    def code(x: Tensor) -> Tensor:
        return x.round_().add_(8.0).to(torch.uint8) & 15

    def pack(codes: Tensor) -> Tensor:  # the first half's are low, the second half's high
        half = (codes.shape[1] + 1) // 2
        low, high = codes[:, :half], codes[:, half:]
        if half > high.shape[1]:
            high = torch.cat([high, torch.zeros_like(low[:, :1])], dim=1)
        return low | (high << 4)

    def unpack(data: Tensor, n: int) -> Tensor:
        return torch.cat([data & 15, data >> 4], dim=1)[:, :n]

    return _scaled(block, 7.0, code, lambda c: c.to(torch.float32).sub_(8.0), pack, unpack, lambda n: (n + 1) // 2)


# Largest finite value; by how many bits the code without its sign is to be shifted to be that of a float32; what that is
# still to be multiplied with, for its exponent begins elsewhere.
_FP8 = {torch.float8_e4m3fn: (448.0, 20, 2.0**120), torch.float8_e5m2: (57344.0, 21, 2.0**112)}


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

    largest, shift, unit = _FP8[dtype]

    def value(codes: Tensor) -> Tensor:
        bits = codes.to(torch.int32)  # by hand: several times as fast as torch's own conversion on CPUs
        sign = (bits & 0x80).mul_(-(2**24))  # the last bit of an int32
        return bits.bitwise_and_(0x7F).mul_(2**shift).add_(sign).view(torch.float32).mul_(unit)

    return _scaled(block, largest, lambda x: x.to(dtype).view(torch.uint8), value)
