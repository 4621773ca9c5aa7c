"""A codec that sends some of the elements.

The others are lost; use it inside `error_feedback`, which sends them later.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..base import factory
from ._codec import Codec, Noise, as_bytes, check_codec, float32, read


@factory
def top_k(k: float, codec: Codec | None = None) -> Codec:
    """The k largest absolute values of a row, with their indices; the other elements are decoded as zeros.

    A row is the part of a bucket that one rank sends to another: on three and more ranks, a chunk of the bucket. Sums
    are reduced to their k largest elements again. Bytes: k times those of a value plus 2, or plus 4 in rows of more
    than 65536 elements.

    Args:
        k: A share in (0, 1], rounded up, or a whole number of elements, at least 1: the type decides.
        codec: The codec of the values; None: `float32`.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `k` out of range, or, when something is encoded, above the elements of a row.

    Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, arXiv:1704.05021; cut again after
        the sum: Shi et al., gTop-k, arXiv:1901.04359.

    >>> codec, x = top_k(0.5), torch.tensor([[3.0, -1.0, 0.5, -4.0]])
    >>> codec.decode(codec.encode(x), 4), codec.width(4)
    (tensor([[ 3.,  0.,  0., -4.]]), 12)
    """
    share = isinstance(k, float) and 0.0 < k <= 1.0
    number = isinstance(k, int) and not isinstance(k, bool) and k >= 1
    if not (share or number):
        raise ValueError(f"k must be a share in (0.0, 1.0] or a whole number, at least 1, got {k!r}")
    inner = float32() if codec is None else check_codec("codec", codec)

    def encode(x: Tensor, noise: Noise | None = None) -> Tensor:
        n = x.shape[1]
        at = x.abs().topk(_count(k, n), dim=1, sorted=False).indices  # NaN counts as the largest
        chosen = x.gather(1, at)
        some = () if noise is None else (noise._replace(positions=noise.positions.gather(1, at)),)
        return torch.cat([inner.encode(chosen, *some), as_bytes(at.to(_place_dtype(n)))], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        count = _count(k, n)
        head = inner.width(count)
        at = read(data[:, head:], _place_dtype(n)).to(torch.int64)
        at = at & 0xFFFF if _place_dtype(n) is torch.int16 else at
        chosen = inner.decode(data[:, :head], count)
        return torch.zeros(data.shape[0], n, dtype=torch.float32, device=data.device).scatter(1, at, chosen)

    def width(n: int) -> int:
        return inner.width(_count(k, n)) + _count(k, n) * _place_dtype(n).itemsize

    return Codec(encode, decode, width, stochastic=inner.stochastic)


def _count(k: float, n: int) -> int:
    if isinstance(k, float):
        return math.ceil(k * n)
    if n and k > n:
        raise ValueError(
            f"k is {k}, but the row to be encoded has {n} elements; pass a share such as 0.01, or partition the leaves"
        )
    return min(k, n)


def _place_dtype(n: int) -> torch.dtype:
    return torch.int16 if n <= 2**16 else torch.int32
