"""Codecs of few values: signs, and multiples of a norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Count, checks, factory, shares
from ._blocks import blocks, in_blocks, largest_of, pack, times_scale, unpack, whole, width
from ._codec import Codec, as_bytes, read


@factory
def sign(block: Count | None = 4096) -> Codec:
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

    def encode(x: Tensor) -> Tensor:
        scales = [x.new_zeros(x.shape[0], 0), *(_mean_size(cut) for cut in in_blocks(x, block))]
        return torch.cat([as_bytes(torch.cat(scales, dim=1)), pack((x < 0).to(torch.uint8), 2)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        head = 4 * blocks(n, block)
        signs = unpack(data[:, head:], n, 2).to(torch.float32).mul_(-2.0).add_(1.0)
        return times_scale(signs, read(data[:, :head], torch.float32), block)

    return Codec(encode, decode, lambda n: 4 * blocks(n, block) + width(n, 2))


def _mean_size(cut: Tensor) -> Tensor:
    """The mean absolute value of each block; of values near the largest float32 the plain sum would overflow."""
    n = cut.shape[2]
    shift = 2.0 ** -n.bit_length()
    return (cut.abs() * shift).sum(dim=2) / (n * shift)


@factory
def qsgd(levels: int = 7, block: Count = 64) -> Codec:
    """Whole multiples of a block's norm / levels, with stochastic rounding: unbiased.

    Bytes per element: 1/4, 1/2 or 1 for up to 1, 7 or 127 levels, and 4 / block.

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
    >>> hook = tx.compress(codec, tx.mean("data"), seed=1)
    >>> tx.simulate(lambda g: hook.update(g, hook.init(g))[0], {"data": 2}, 2 * [torch.tensor([3.0, -4.0])])[0]
    tensor([ 3., -4.])
    """
    checks.whole_number("levels", levels, 1, 127)

    # Squares could overflow and underflow where the values themselves do not.
    def norm(cut: Tensor) -> Tensor:
        most = largest_of(cut)
        return torch.linalg.vector_norm(cut / shares.nonzero_or_one(most).unsqueeze(2), dim=2) * most

    return whole(block, levels, True, measure=norm)
