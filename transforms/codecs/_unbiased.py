"""Codecs that are always stochastic: decoded values are unbiased, and there are few different ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .._check import positive, whole_number
from ..spec._spec import factory
from ..transform._weights import nonzero_or_one
from ._codec import Codec, as_bytes, poison, read
from ._random_bits import Noise
from ._scaled import check_block, largest_of, slices, whole


@factory
def qsgd(levels: int = 7, block: int = 64) -> Codec:
    """Whole multiples of a block's norm / levels, with stochastic rounding: unbiased.

    Bytes per element: 1 / 5, 1 / 3, 1/2 or 1 for up to 1, 2, 7 or 127 levels, and 4 / block.

    Args:
        levels: Steps from 0 to the norm, 1 to 127.
        block: Elements that share a norm, at least 1: the error grows with its square root.

    Returns:
        A `Codec`.

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
    whole_number("levels", levels, 1, 127)

    # Squares could overflow and underflow where the values themselves do not.
    def norm(cut: Tensor) -> Tensor:
        most = largest_of(cut)
        return torch.linalg.vector_norm(cut / nonzero_or_one(most).unsqueeze(2), dim=2) * most

    return whole(block, levels, True, measure=norm)


@factory
def terngrad(block: int | None = None, clip: float | None = None) -> Codec:
    """-1, 0 or 1 times a block's largest absolute value, with stochastic rounding: unbiased. Five elements in a byte.

    Args:
        block: Elements that share a scale; None: all elements of a bucket that one rank sends to another.
        clip: Values are first clipped to this multiple of their block's root mean square, at least 1. That makes the
            other values more exact, and the clipped ones too small. The paper takes 2.5 standard deviations, which are
            0 where all values are equal. None: no clipping.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0, `clip` below 1.

    Source: Wen et al., TernGrad, arXiv:1705.07878, sections 3.1 and 3.2.

    >>> terngrad().width(10)
    6
    """
    check_block(block, may_be_none=True)
    if clip is not None:
        if positive("clip, if not None,", clip) < 1:
            raise ValueError(f"clip must be at least 1, got {clip!r}: below it all values are cut")

    def limit(cut: Tensor) -> Tensor:
        assert clip is not None
        largest = largest_of(cut).unsqueeze(2)  # the squares of cut / largest neither overflow nor underflow
        most = clip * (cut / nonzero_or_one(largest)).square().mean(dim=2, keepdim=True).sqrt() * largest
        return torch.maximum(torch.minimum(cut, most), -most)

    return whole(block, 1, True, limit=limit if clip is not None else None)


@factory
def natural() -> Codec:
    """One byte: a sign and a power of two, with stochastic rounding to one of the two neighbours: unbiased.

    Powers below 2**-126 of the largest become 0. Bytes per element: 1.

    Returns:
        A `Codec`.

    Source: Horvath et al., Natural Compression, arXiv:1905.10988, with a scale for each row in place of the whole
        exponent.

    >>> natural().width(10)
    14
    """

    def encode(x: Tensor, noise: Noise) -> Tensor:
        found = [x.new_zeros(x.shape[0], 0, dtype=torch.uint8)]
        for part, where in zip(slices(x.unsqueeze(1)), slices(noise.positions.unsqueeze(1)), strict=True):
            bits = part.contiguous().view(torch.int32)
            exponent = (bits >> 23).bitwise_and_(0xFF)  # 0 for values below the smallest normal power of two
            up = noise._replace(positions=where).uniform() < (bits & 0x7FFFFF).to(torch.float32).mul_(2.0**-23)
            found.append(exponent.add_(up & (exponent > 0)).clamp(max=254).to(torch.uint8).flatten(1))
        exponents = torch.cat(found, dim=1)
        most = exponents.amax(dim=1, keepdim=True) if x.shape[1] else exponents.new_ones(x.shape[0], 1)
        most = most.clamp(min=1)
        scale = (most.to(torch.int32) << 23).view(torch.float32) + 0 * poison(x)
        below = torch.where(exponents > 0, (most - exponents).clamp(max=127), torch.full_like(exponents, 127))
        return torch.cat([as_bytes(scale), below | torch.signbit(x).to(torch.uint8).mul_(128)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        scale, codes = read(data[:, :4], torch.float32), data[:, 4:].to(torch.int32)
        # 127 gives a float whose bits are all 0, except the sign.
        power = (127 - (codes & 0x7F)) * 2**23 + (codes & 0x80) * -(2**24)
        return power.view(torch.float32) * scale

    return Codec(encode, decode, lambda n: 4 + n, stochastic=True)
