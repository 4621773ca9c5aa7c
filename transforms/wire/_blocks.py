"""Codecs of few bits, with a scale for every block of elements.

A block is what has one scale: what is largest in it becomes the largest code. A value that is not finite makes the scale so, and
with it the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._spec import factory
from ..sync._weights import not_zero
from ._codec import Codec, as_bytes, by_chance, read
from ._digits import pack, unpack, whole_bits, width
from ._noise import Noise


def check_block(block: int | None, may_be_none: bool = False) -> None:
    if may_be_none and block is None:
        return
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a whole number, at least 1{', or None' if may_be_none else ''}, got {block!r}")


def in_blocks(x: Tensor, block: int | None) -> Iterator[Tensor]:
    """(rows, n) as (rows, blocks, block), and what is left over as (rows, 1, rest); nothing of what is empty."""
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
    limit: Callable[[Tensor], Tensor] | None = None,
) -> Codec:
    """A codec of scales in float32, followed by codes.

    Args:
        block: Elements that share a scale; None: all of a row.
        largest: The largest code's value.
        code: (values up to `largest`, which it may overwrite; uniform noise, or None) to codes, uint8. Of a value that is
            not finite it may make anything.
        value: The other way round, to float32 in new memory.
        base: How many codes there are.
        measure: (rows, blocks, size) to (rows, blocks): what becomes `largest`.
        limit: What is done to the blocks before.
    """
    check_block(block, may_be_none=True)

    def encode(x: Tensor, noise: Noise | None = None) -> Tensor:
        scales, codes = [x.new_zeros(x.shape[0], 0)], [x.new_zeros(x.shape[0], 0, dtype=torch.uint8)]
        dice = None if noise is None else in_blocks(noise.uniform(), block)
        for cut in in_blocks(x, block):
            cut = cut if limit is None else limit(cut)
            scale = measure(cut) / largest
            inverse = 1 / scale
            inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(scale))
            scales.append(scale)
            codes.append(code(cut * inverse.unsqueeze(2), None if dice is None else next(dice)).flatten(1))
        return torch.cat([as_bytes(torch.cat(scales, dim=1)), pack(torch.cat(codes, dim=1), base)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        head = 4 * blocks(n, block)
        return times_scale(value(unpack(data[:, head:], n, base)), read(data[:, :head], torch.float32), block)

    return Codec(encode, decode, lambda n: 4 * blocks(n, block) + width(n, base), noisy=stochastic)


def rounded(x: Tensor, dice: Tensor | None, largest: int) -> Tensor:
    """In place to the nearest whole number, or by chance to one of the two beside it."""
    # The largest value may come out a little above the largest code, and would be rounded up to none at all.
    return x.round_() if dice is None else _cut(_cut(x, largest).add(dice).floor_(), largest)


def _cut(x: Tensor, largest: int) -> Tensor:
    mapped = torch._C._are_functorch_transforms_active()  # vmap has no clamp_
    return x.clamp(-largest, largest) if mapped else x.clamp_(-largest, largest)


def whole(
    block: int | None,
    largest: int,
    stochastic: bool,
    measure: Callable[[Tensor], Tensor] = largest_of,
    limit: Callable[[Tensor], Tensor] | None = None,
) -> Codec:
    """Codes that are whole numbers from -largest to largest; see `scaled`."""
    if largest == 127:  # as bytes with a sign they need no shift
        return scaled(
            block,
            127.0,
            lambda x, dice: rounded(x, dice, 127).to(torch.int8).view(torch.uint8),
            lambda codes: codes.view(torch.int8).to(torch.float32),
            stochastic=stochastic,
            measure=measure,
            limit=limit,
        )
    base = 2 * largest + 1

    def code(x: Tensor, dice: Tensor | None) -> Tensor:
        # The code of what is not finite may be anything, but must not spill into its neighbours.
        codes = rounded(x, dice, largest).add_(largest)
        if (bits := whole_bits(base)) & (bits - 1) == 0:
            return codes.to(torch.uint8) & (bits - 1)
        return codes.nan_to_num_().clamp(0, base - 1).to(torch.uint8)

    return scaled(
        block,
        float(largest),
        code,
        lambda codes: codes.to(torch.float32).sub_(largest),
        base=base,
        stochastic=stochastic,
        measure=measure,
        limit=limit,
    )


@factory
def int8(block: int = 256, stochastic: bool = False) -> Codec:
    """One byte: 255 steps between the largest absolute value of a block and its negative.

    The error is at most 1 / 254 of that value. Bytes per element: 1 + 4 / block.

    Args:
        block: Elements that share a scale, at least 1.
        stochastic: Round up or down by chance, so that what is decoded is right on average; the error is at most 1 / 127.

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
    """Half a byte: 15 steps. Bytes per element: 1/2 + 4 / block; an odd element has a byte of its own.

    Args:
        block: Elements that share a scale, at least 1.
        stochastic: As for `int8`.

    Raises:
        ValueError: `block` is no whole number above 0.

    >>> codec, x = int4(), torch.tensor([[7.0, -3.2, 0.4]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[ 7., -3.,  0.]]), 6)
    """
    check_block(block)
    return whole(block, 7, stochastic)


# Largest finite value; by how many bits the code without its sign is to be shifted to be that of a float32; what that is
# still to be multiplied with, for its exponent begins elsewhere; bits of fraction; the smallest power of two with all of them.
_FP8 = {
    torch.float8_e4m3fn: (448.0, 20, 2.0**120, 3, 2.0**-6),
    torch.float8_e5m2: (57344.0, 21, 2.0**112, 2, 2.0**-14),
}


@factory
def fp8(block: int = 256, dtype: torch.dtype = torch.float8_e4m3fn, stochastic: bool = False) -> Codec:
    """One byte, a small float: three or two bits of fraction, and a scale for each block.

    Args:
        block: Elements that share a scale, at least 1.
        dtype: torch.float8_e4m3fn, an error of at most 1 / 16 of each value, or torch.float8_e5m2, 1 / 8 and a wider range.
        stochastic: Round up or down by chance, so that what is decoded is right on average; twice the error at most.

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

    def code(x: Tensor, dice: Tensor | None) -> Tensor:
        if dice is not None:
            x = by_chance(x, dice, fraction, smallest).clamp(-largest, largest)
        return x.to(dtype).view(torch.uint8)

    def value(codes: Tensor) -> Tensor:
        bits = codes.to(torch.int32)  # by hand: several times as fast as torch's own conversion on CPUs
        sign = (bits & 0x80).mul_(-(2**24))  # the last bit of an int32
        return bits.bitwise_and_(0x7F).mul_(2**shift).add_(sign).view(torch.float32).mul_(unit)

    return scaled(block, largest, code, value, stochastic=stochastic)


@factory
def qsgd(levels: int = 7, block: int = 64) -> Codec:
    """Whole multiples of a block's norm / levels, rounded by chance: right on average.

    Bytes per element: 1 / 5, 1 / 3, 1/2 or 1 for up to 1, 2, 7 or 127 levels, and 4 / block.

    Args:
        levels: Steps from 0 to the norm, 1 to 127.
        block: Elements that share a norm, at least 1: the error grows with its square root.

    Raises:
        ValueError: `block` or `levels` is no whole number, or out of range.

    Source: Alistarh et al., QSGD, arXiv:1610.02132, section 3.1, with codes of equal length.

    >>> codec = qsgd(levels=5, block=2)
    >>> codec.width(6)
    15
    >>> from fjoin import transforms as tx
    >>> hook = tx.quantized_mean("data", codec, seed=1)
    >>> tx.simulate(lambda g: hook.update(g, hook.init(g))[0], {"data": 2}, 2 * [torch.tensor([3.0, -4.0])])[0]
    tensor([ 3., -4.])
    """
    check_block(block)
    if isinstance(levels, bool) or not isinstance(levels, int) or not 1 <= levels <= 127:
        raise ValueError(f"levels must be a whole number from 1 to 127, got {levels!r}")

    # A norm of squares would overflow and underflow where the values themselves do not.
    def norm(cut: Tensor) -> Tensor:
        most = largest_of(cut)
        return torch.linalg.vector_norm(cut / not_zero(most).unsqueeze(2), dim=2) * most

    return whole(block, levels, True, measure=norm)


@factory
def terngrad(block: int | None = None, clip: float | None = None) -> Codec:
    """-1, 0 or 1 times a block's largest absolute value, by chance: right on average. Five in a byte.

    Args:
        block: Elements that share a scale; None: all that one rank sends another of a bucket.
        clip: Values beyond so many standard deviations of their block are cut first, which makes the rest more exact and
            them too small; the paper takes 2.5. None: none are.

    Raises:
        ValueError: `block` is no whole number above 0, `clip` not above 0.

    Source: Wen et al., TernGrad, arXiv:1705.07878, sections 3.1 and 3.2.

    >>> terngrad().width(10)
    6
    """
    check_block(block, may_be_none=True)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0, or None, got {clip!r}")

    def limit(cut: Tensor) -> Tensor:
        assert clip is not None
        spread = (cut - cut.mean(dim=2, keepdim=True)).square().mean(dim=2, keepdim=True).sqrt()
        most = clip * spread
        return torch.maximum(torch.minimum(cut, most), -most)

    return whole(block, 1, True, limit=limit if clip is not None else None)


@factory
def uint8(block: int | None = None) -> Codec:
    """One byte: 255 equal steps from the smallest value of a block to its largest, 0 being one of them.

    The error is at most 1 / 510 of their distance. Good where values have mostly one sign. Bytes per element: 1 + 5 / block.

    Args:
        block: Elements that share a scale; None: all that one rank sends another of a bucket.

    Raises:
        ValueError: `block` is no whole number above 0.

    Same as: what torch's quantization_pertensor_hook (None) and quantization_perchannel_hook (512) send, whose scale is at
        least 1.2e-7.

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
