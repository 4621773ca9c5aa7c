"""Codecs of one byte or half a byte per element, in equal steps or as small floats."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec._spec import factory
from ._codec import Codec, as_bytes, read, stochastic_round
from ._scaled import blocks, check_block, in_blocks, scaled, times_scale, whole


@factory
def int8(block: int = 256, stochastic: bool = False) -> Codec:
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
    check_block(block)
    return whole(block, 127, stochastic)


@factory
def int4(block: int = 64, stochastic: bool = False) -> Codec:
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
    check_block(block)
    return whole(block, 7, stochastic)


# The largest finite value; the shift that makes a float32 of the code without its sign; the factor that corrects the
# bias of its exponent; bits of fraction; the smallest power of two with all of these bits.
_FP8 = {
    torch.float8_e4m3fn: (448.0, 20, 2.0**120, 3, 2.0**-6),
    torch.float8_e5m2: (57344.0, 21, 2.0**112, 2, 2.0**-14),
}


@factory
def fp8(block: int = 256, dtype: torch.dtype = torch.float8_e4m3fn, stochastic: bool = False) -> Codec:
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
    check_block(block)
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
def uint8(block: int | None = None) -> Codec:
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
    check_block(block, may_be_none=True)

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
