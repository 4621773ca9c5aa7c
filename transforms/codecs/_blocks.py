"""Codecs with a scale for each block: int8, int4, uint8, fp8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..base import Count, factory
from ._codec import Codec, Noise, as_bytes, read, stochastic_round


def bits_of(base: int) -> int:
    """The bits of a digit below `base`: 1, 2, 4 or 8, so that a byte holds whole digits.

    >>> [bits_of(base) for base in (2, 3, 15, 255)]
    [1, 2, 4, 8]
    """
    return next(bits for bits in (1, 2, 4, 8) if base <= 2**bits)


def width(n: int, base: int) -> int:
    """Bytes of n digits."""
    return -(-n * bits_of(base) // 8)


def pack(digits: Tensor, base: int) -> Tensor:
    """Pack (rows, n) uint8 below `base` as (rows, width(n)); the digits of the first part of a row are the lowest."""
    bits, n = bits_of(base), digits.shape[1]
    if bits == 8:
        return digits
    parts = torch.nn.functional.pad(digits, (0, -n % (8 // bits))).unflatten(1, (8 // bits, -1)).unbind(1)
    packed = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        packed = packed + part * 2 ** (i * bits)
    return packed


def unpack(data: Tensor, n: int, base: int) -> Tensor:
    """The inverse of `pack`: (rows, width(n)) -> (rows, n)."""
    bits = bits_of(base)
    if bits == 8:
        return data
    return torch.cat([data >> at & (2**bits - 1) for at in range(0, 8, bits)], dim=1)[:, :n]


def in_blocks(x: Tensor, block: int | None) -> Iterator[Tensor]:
    """(rows, n) as (rows, blocks, block), then the remainder as (rows, 1, remainder); empty parts are omitted."""
    n = x.shape[1]
    size = block or max(n, 1)
    whole = n // size * size
    for piece, length in ((x[:, :whole], size), (x[:, whole:], n - whole)):
        if piece.shape[1]:
            yield piece.unflatten(1, (-1, length))


def blocks(n: int, block: int | None) -> int:
    return -(-n // (block or max(n, 1)))


def times_scale(values: Tensor, scale: Tensor, block: int | None) -> Tensor:
    """(rows, n) float32, which may be overwritten, times the (rows, blocks) scales."""
    n, count = values.shape[1], scale.shape[1]
    size = min(block or n, n)
    if not n:
        return values
    if short := count * size - n:
        values = torch.nn.functional.pad(values, (0, short))
    return values.unflatten(1, (count, size)).mul_(scale.unsqueeze(2)).flatten(1)[:, :n]


def largest_of(cut: Tensor) -> Tensor:
    return torch.maximum(cut.amax(dim=2), -cut.amin(dim=2))


def scaled(
    block: int | None,
    largest: float,
    code: Callable[[Tensor, Tensor | None], Tensor],
    value: Callable[[Tensor], Tensor],
    *,
    base: int = 256,
    stochastic: bool = False,
    measure: Callable[[Tensor], Tensor] = largest_of,
) -> Codec:
    """A codec whose rows are scales in float32, followed by codes.

    Args:
        block: Elements that share a scale; None: all of a row.
        largest: The largest code's value.
        code: (values up to `largest`, which it may overwrite; uniform noise, or None) -> codes, uint8. The code of a
            non-finite value is arbitrary.
        value: The inverse: codes -> float32 values in new memory.
        base: The number of codes.
        measure: (rows, blocks, size) -> (rows, blocks): the value that is mapped to `largest`.
    """

    def encode(x: Tensor, noise: Noise | None = None) -> Tensor:
        scales, codes = list[Tensor](), list[Tensor]()
        positions = None if noise is None else in_blocks(noise.positions, block)
        for cut in in_blocks(x, block):
            scale = measure(cut) / largest
            inverse = scale.reciprocal().nan_to_num(0.0, 0.0, 0.0).unsqueeze(2)
            scales.append(scale)
            if noise is None or positions is None:
                codes.append(code(cut * inverse, None).flatten(1))
                continue
            for values, factor, where in zip(*map(slices, (cut, inverse.expand_as(cut), next(positions))), strict=True):
                codes.append(code(values * factor, noise._replace(positions=where).uniform()).flatten(1))
        if not codes:
            return x.new_zeros(x.shape[0], 0, dtype=torch.uint8)
        return torch.cat([as_bytes(joined(scales)), pack(joined(codes), base)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        head = 4 * blocks(n, block)
        return times_scale(value(unpack(data[:, head:], n, base)), read(data[:, :head], torch.float32), block)

    return Codec(encode, decode, lambda n: 4 * blocks(n, block) + width(n, base), stochastic=stochastic)


def joined(parts: list[Tensor]) -> Tensor:
    """Parts of rows, one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def slices(cut: Tensor) -> tuple[Tensor, ...]:
    """Blocks, or one long block, in pieces that fit a CPU's cache together with their random numbers."""
    rows, count, size = cut.shape
    most = max(_SLICE, cut.numel() // 64) if cut.device.type == "cpu" else cut.numel()
    if count == 1:
        return cut.split(max(1, most // max(1, rows)), dim=2)
    return cut.split(max(1, most // max(1, rows * size)), dim=1)


_SLICE = 2**17  # elements; with it stochastic encoding is twice as fast


def rounded(x: Tensor, uniform: Tensor | None, largest: int) -> Tensor:
    """Round in place to the nearest whole number, or with `uniform` numbers stochastically up or down."""
    # The largest value may be a little above the largest code; rounded up, it would have no code.
    return x.round_() if uniform is None else _cut(_cut(x, largest).add(uniform).floor_(), largest)


def _cut(x: Tensor, largest: int) -> Tensor:
    mapped = torch._C._are_functorch_transforms_active()  # vmap has no clamp_
    return x.clamp(-largest, largest) if mapped else x.clamp_(-largest, largest)


def whole(block: int | None, largest: int, stochastic: bool, measure: Callable[[Tensor], Tensor] = largest_of) -> Codec:
    """A codec whose codes are whole numbers from -largest to largest; see `scaled`."""
    make = functools.partial(scaled, block, float(largest), stochastic=stochastic, measure=measure)
    if largest == 127:  # signed bytes need no shift
        return make(
            lambda x, uniform: rounded(x, uniform, 127).to(torch.int8).view(torch.uint8),
            lambda codes: codes.view(torch.int8).to(torch.float32),
        )
    base = 2 * largest + 1

    def code(x: Tensor, uniform: Tensor | None) -> Tensor:
        # The code of a non-finite value is arbitrary, but must not change its neighbours.
        return rounded(x, uniform, largest).add_(largest).to(torch.uint8) & (2 ** bits_of(base) - 1)

    return make(code, lambda codes: codes.to(torch.float32).sub_(largest), base=base)


@factory
def int8(block: Count = 256, stochastic: bool = False) -> Codec:
    """One byte: 255 values in equal steps, from the negative of a block's largest absolute value to that value.

    The error is at most 1 / 254 of that value. Bytes per element: 1 + 4 / block.

    Args:
        block: Elements that share a scale, at least 1.
        stochastic: Use stochastic rounding, so that decoded values are unbiased; the error is at most 1 / 127.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, section 2.1, with equal
        steps.

    >>> codec, x = int8(), torch.tensor([[127.0, -3.2, 0.4]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[127.,  -3.,   0.]]), 7)
    """
    return whole(block, 127, stochastic)


@factory
def int4(block: Count = 64, stochastic: bool = False) -> Codec:
    """Half a byte: 15 values. Bytes per element: 1/2 + 4 / block; an odd element has a byte of its own.

    Args:
        block: Elements that share a scale, at least 1.
        stochastic: As for `int8`.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0.

    >>> codec, x = int4(), torch.tensor([[7.0, -3.2, 0.4]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[ 7., -3.,  0.]]), 6)
    """
    return whole(block, 7, stochastic)


# The largest finite value; the shift that makes a float32 of the code without its sign; the factor that corrects the
# bias of its exponent; bits of fraction; the smallest power of two with all of these bits.
_FP8 = {
    torch.float8_e4m3fn: (448.0, 20, 2.0**120, 3, 2.0**-6),
    torch.float8_e5m2: (57344.0, 21, 2.0**112, 2, 2.0**-14),
}


@factory
def fp8(block: Count = 256, dtype: torch.dtype = torch.float8_e4m3fn, stochastic: bool = False) -> Codec:
    """One byte, a small float: three or two bits of fraction, and a scale for each block.

    Args:
        block: Elements that share a scale, at least 1.
        dtype: torch.float8_e4m3fn, with an error of at most 1 / 16 of values down to 2**-14 of their block's largest,
            or torch.float8_e5m2, with 1 / 8 of values down to 2**-29. Smaller values have the absolute error of these.
        stochastic: Use stochastic rounding, so that decoded values are unbiased; at most twice the error.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0; another dtype.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.

    >>> codec, x = fp8(), torch.tensor([[448.0, -3.2, 9.0]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[448.0000,  -3.2500,   9.0000]]), 7)
    """
    if dtype not in _FP8:
        raise ValueError(f"dtype must be one of {sorted(map(str, _FP8))}, got {dtype!r}")
    largest, shift, unit, fraction, smallest = _FP8[dtype]

    def code(x: Tensor, uniform: Tensor | None) -> Tensor:
        if uniform is not None:
            x = stochastic_round(x, uniform, fraction, smallest).clamp(-largest, largest)
        return x.to(dtype).view(torch.uint8)

    def value(codes: Tensor) -> Tensor:
        bits = codes.to(torch.int32)  # bit operations are several times as fast as torch's conversion on CPUs
        sign = (bits & 0x80).mul_(-(2**24))  # the sign bit of an int32
        return bits.bitwise_and_(0x7F).mul_(2**shift).add_(sign).view(torch.float32).mul_(unit)

    return scaled(block, largest, code, value, stochastic=stochastic)


@factory
def uint8(block: Count | None = None) -> Codec:
    """One byte: 255 equal steps from the smallest value of a block to its largest; 0 is one of the values.

    The error is at most 1 / 510 of their distance. It is good for values that mostly have one sign. Bytes per element:
    1 + 5 / block.

    Args:
        block: Elements that share a scale; None: all elements of a bucket that one rank sends to another.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0.

    Same as: the messages of torch's quantization_pertensor_hook (None) and quantization_perchannel_hook (512), whose
        scale is at least 1.2e-7.

    >>> codec, x = uint8(), torch.tensor([[0.0, 255.0, 3.2]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[  0., 255.,   3.]]), 8)
    """

    def encode(x: Tensor) -> Tensor:
        scales, zeros = [x.new_zeros(x.shape[0], 0)], [x.new_zeros(x.shape[0], 0, dtype=torch.uint8)]
        codes = list(zeros)
        for cut in in_blocks(x, block):
            low, high = cut.amin(dim=2).clamp(max=0.0), cut.amax(dim=2).clamp(min=0.0)
            scale = high / 255 - low / 255
            inverse = 1 / scale
            inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(scale))
            zero = (-low * inverse).nan_to_num(0.0).round()
            scales.append(scale)
            zeros.append(zero.to(torch.uint8))
            code = (cut * inverse.unsqueeze(2)).nan_to_num(0.0).round_().add_(zero.unsqueeze(2)).clamp(0, 255)
            codes.append(code.to(torch.uint8).flatten(1))
        return torch.cat([as_bytes(torch.cat(scales, dim=1)), *zeros, *codes], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        count, size = blocks(n, block), min(block or n, n)
        scale, zero = read(data[:, : 4 * count], torch.float32), data[:, 4 * count : 5 * count].to(torch.float32)
        shift = zero.unsqueeze(2).expand(-1, -1, size).flatten(1)[:, :n]
        return times_scale(data[:, 5 * count :].to(torch.float32) - shift, scale, block)

    return Codec(encode, decode, lambda n: 5 * blocks(n, block) + n)
