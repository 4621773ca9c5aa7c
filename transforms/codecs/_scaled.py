"""Codecs with a scale for every block of elements.

The elements of a block share one scale, which maps the largest of them to the largest code. A non-finite value makes
the scale, and so the whole block, non-finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._check import flag, whole_number
from ._bit_packing import pack, unpack, whole_bits, width
from ._codec import Codec, as_bytes, read
from ._random_bits import Noise


def check_block(block: int | None, may_be_none: bool = False) -> None:
    if block is not None or not may_be_none:
        whole_number("block, if not None," if may_be_none else "block", block, 1)


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
    check_block(block, may_be_none=True)
    flag("stochastic", stochastic)

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
    """Parts of rows, one behind the other."""
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
        codes = rounded(x, uniform, largest).add_(largest)
        if (bits := whole_bits(base)) & (bits - 1) == 0:
            return codes.to(torch.uint8) & (bits - 1)
        return codes.nan_to_num_().clamp(0, base - 1).to(torch.uint8)

    return make(code, lambda codes: codes.to(torch.float32).sub_(largest), base=base)
