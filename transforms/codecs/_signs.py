"""A codec of one bit for each element, with a value for every block."""

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
        return torch.cat([as_bytes(torch.cat(scales, dim=1)), pack((x < 0).to(torch.uint8), 2)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        head = 4 * blocks(n, block)
        signs = unpack(data[:, head:], n, 2).to(torch.float32).mul_(-2.0).add_(1.0)
        return times_scale(signs, read(data[:, :head], torch.float32), block)

    return Codec(encode, decode, lambda n: 4 * blocks(n, block) + width(n, 2))
