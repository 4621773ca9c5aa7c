"""Powers of two in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from .._spec import factory
from ._codec import Codec, as_bytes, read
from ._noise import Noise


@factory
def natural() -> Codec:
    """One byte, a sign and a power of two, one of the two beside a value by chance: right on average.

    Powers below 2**-126 of the largest become 0. Bytes per element: 1.

    Source: Horvath et al., Natural Compression, arXiv:1905.10988, with a scale for each row in place of the whole exponent.

    >>> natural().width(10)
    14
    """

    def encode(x: Tensor, noise: Noise) -> Tensor:
        bits = x.contiguous().view(torch.int32)
        exponent = (bits >> 23) & 0xFF  # 0 for what is too small for a power of two of its own
        up = noise.uniform() < (bits & 0x7FFFFF).to(torch.float32) * 2.0**-23
        exponent = torch.where(exponent > 0, (exponent + up).clamp(max=254), exponent)
        most = exponent.amax(dim=1, keepdim=True) if x.shape[1] else exponent.new_ones(x.shape[0], 1)
        most = most.clamp(min=1)
        scale = (most << 23).view(torch.float32) + 0 * _sum(x)
        below = torch.where(exponent > 0, most - exponent, torch.full_like(exponent, 127)).clamp(max=127)
        return torch.cat([as_bytes(scale), (below | ((bits >> 24) & 0x80)).to(torch.uint8)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        scale, codes = read(data[:, :4], torch.float32), data[:, 4:].to(torch.int32)
        # 127 gives 0, all bits of it.
        power = (127 - (codes & 0x7F)) * 2**23 + (codes & 0x80) * -(2**24)
        return power.view(torch.float32) * scale

    return Codec(encode, decode, lambda n: 4 + n, noisy=True)


def _sum(x: Tensor) -> Tensor:
    """(rows, 1): not finite where anything in the row is not."""
    return (x * 0).sum(dim=1, keepdim=True)
