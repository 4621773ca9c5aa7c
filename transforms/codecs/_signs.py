"""Codecs of one bit for each element, with the values of the bits for every block."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec._spec import factory
from ._bit_packing import pack, unpack, width
from ._codec import Codec, as_bytes, read
from ._scaled import blocks, check_block, in_blocks, times_scale


@factory
def sign(block: int | None = 4096) -> Codec:
    """One bit: the sign, times the mean absolute value of a block.

    So a block of zeros is decoded as zeros, and a rank without input adds nothing. Bytes per element: 1 / 8 + 4 /
    block. Use it inside `error_feedback`.

    Args:
        block: Elements that share a scale; None: all elements of a bucket that one rank sends to another.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, arXiv:1901.09847, the scaled sign of section 5.

    >>> codec, x = sign(), torch.tensor([[3.0, -1.0, 2.0]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[ 2., -2.,  2.]]), 5)
    """
    check_block(block, may_be_none=True)

    def encode(x: Tensor) -> Tensor:
        scales = [x.new_zeros(x.shape[0], 0), *(cut.abs().mean(dim=2) for cut in in_blocks(x, block))]
        return torch.cat([as_bytes(torch.cat(scales, dim=1)), _negative(x)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        head = 4 * blocks(n, block)
        signs = unpack(data[:, head:], n, 2).to(torch.float32).mul_(-2.0).add_(1.0)
        return times_scale(signs, read(data[:, :head], torch.float32), block)

    return Codec(encode, decode, lambda n: 4 * blocks(n, block) + width(n, 2))


@factory
def one_bit(block: int | None = 4096) -> Codec:
    """One bit: whether a value is negative. It is decoded as the mean of the block's negative values, or of the others.

    Bytes per element: 1 / 8 + 8 / block. Use it inside `error_feedback`, which keeps the errors of the ranks that send
    and of the ranks that sum.

    Args:
        block: Elements that share two means; None: all elements of a bucket that one rank sends to another.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `block` is no whole number above 0.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014, section 3.2, with 0 as the threshold.

    >>> codec, x = one_bit(), torch.tensor([[3.0, -1.0, 2.0]])
    >>> codec.decode(codec.encode(x), 3), codec.width(3)
    (tensor([[ 2.5000, -1.0000,  2.5000]]), 9)
    """
    check_block(block, may_be_none=True)

    def encode(x: Tensor) -> Tensor:
        lows, highs = [x.new_zeros(x.shape[0], 0)], [x.new_zeros(x.shape[0], 0)]
        for cut in in_blocks(x, block):
            count, size = (cut < 0).sum(dim=2), cut.shape[2]
            lows.append(cut.clamp(max=0.0).mean(dim=2) * (size / count.clamp(min=1).to(cut.dtype)))
            highs.append(cut.clamp(min=0.0).mean(dim=2) * (size / (size - count).clamp(min=1).to(cut.dtype)))
        return torch.cat([as_bytes(torch.cat(lows + highs, dim=1)), _negative(x)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        count = blocks(n, block)
        means, bits = read(data[:, : 8 * count], torch.float32), unpack(data[:, 8 * count :], n, 2).to(torch.float32)
        low, high = means[:, :count], means[:, count:]
        # 0 times a non-finite mean is NaN, so the whole block is not finite.
        return times_scale(bits.clone(), low, block) + times_scale(1.0 - bits, high, block)

    return Codec(encode, decode, lambda n: 8 * blocks(n, block) + width(n, 2))


def _negative(x: Tensor) -> Tensor:
    return pack((x < 0).to(torch.uint8), 2)
