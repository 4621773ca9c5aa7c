"""Codecs that send some of the elements, and nothing of the others.

The other elements are lost; use these codecs inside `error_feedback`, which sends them later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._check import flag
from ..spec._spec import factory
from ._codec import Codec, as_bytes, check_codec, float32, poison, read
from ._random_bits import Noise, hash32_


@factory
def top_k(k: float, values: Codec | None = None) -> Codec:
    """The k largest absolute values of a row, with their indices; the other elements are decoded as zeros.

    A row is the part of a bucket that one rank sends to another: on three and more ranks, a chunk of the bucket. Sums
    are reduced to their k largest elements again. Bytes: k times those of a value plus 2, or plus 4 in rows of more
    than 65536 elements.

    Args:
        k: A share in (0, 1], rounded up, or a whole number of elements, at least 1: the type decides.
        values: The codec of the values; None: `float32`.

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
    return _chosen(k, values)


@factory
def threshold(value: float, most: float = 0.01, values: Codec | None = None) -> Codec:
    """The elements whose absolute value reaches a threshold, up to a share of all elements.

    The number of bytes is that of `top_k(most)` in every message, so it is known in advance. The threshold only
    suppresses noise.

    Args:
        value: Elements with a smaller absolute value are not sent; at least 0.
        most: The largest number of elements that are sent; like the `k` of `top_k`.
        values: The codec of the values; None: `float32`.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `value` is negative or NaN; `most` as the `k` of `top_k`.

    Source: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.

    >>> keep = threshold(1.0, most=0.75)
    >>> keep.decode(keep.encode(torch.tensor([[3.0, -1.0, 0.5, -4.0]])), 4)
    tensor([[ 3., -1.,  0., -4.]])
    >>> keep.decode(keep.encode(torch.tensor([[0.3, -0.1, 0.5, -4.0]])), 4)
    tensor([[ 0.,  0.,  0., -4.]])
    """
    if not (isinstance(value, (int, float)) and value >= 0):
        raise ValueError(f"value must be a number, at least 0, got {value!r}")
    return _chosen(most, values, float(value))


def _chosen(k: float, values: Codec | None, least: float = 0.0) -> Codec:
    _check_k(k)
    inner = _check_values(values)

    def encode(x: Tensor, noise: Noise | None = None) -> Tensor:
        n = x.shape[1]
        at = x.abs().topk(_count(k, n), dim=1, sorted=False).indices  # NaN counts as the largest
        chosen = x.gather(1, at)
        if least:
            chosen = torch.where(chosen.abs() < least, torch.zeros_like(chosen), chosen)
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


@factory
def random_k(k: float, values: Codec | None = None, scaled: bool = False) -> Codec:
    """k random elements of a row, the same ones on all ranks; the other elements are decoded as zeros.

    A row is split into k parts, and one element is drawn from each part. Instead of the indices, only the key of the
    random numbers is sent. Bytes: k times those of a value, plus 4.

    Args:
        k: As for `top_k`.
        values: The codec of the values; None: `float32`.
        scaled: Multiply by about n / k, which makes the result unbiased: for use without `error_feedback`.

    Returns:
        A `Codec`.

    Raises:
        ValueError: `k` out of range, or, when something is encoded, above the elements of a row.

    Source: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, arXiv:1809.07599.

    >>> from fjoin import transforms as tx
    >>> hook = tx.quantized_mean("data", random_k(0.5), seed=3)
    >>> g = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> tx.simulate(lambda: hook.update(g, hook.init(g))[0], {"data": 2})[1]
    tensor([1., 0., 0., 4.])
    """
    _check_k(k)
    flag("scaled", scaled)
    inner = _check_values(values)

    def drawn(key: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The indices drawn with (rows, 1) keys, (rows, count), and the size of the part of each, (count,)."""
        count = _count(k, n)
        part = torch.arange(count + 1, device=key.device) * n // max(count, 1)
        random = hash32_(key + torch.arange(count, dtype=torch.int32, device=key.device)).to(torch.int64) & 0x7FFFFFFF
        of = part[1:] - part[:-1]
        return part[:-1] + random % of, of

    def encode(x: Tensor, noise: Noise) -> Tensor:
        key = noise.common.to(x.device, torch.int32).expand(x.shape[0], 1)
        at, of = drawn(key, x.shape[1])
        chosen = x.gather(1, at) * of if scaled else x.gather(1, at)
        # A non-finite element that is not drawn must make the row non-finite too.
        chosen = chosen + poison(x)
        some = (noise._replace(positions=noise.positions.gather(1, at)),) if inner.stochastic else ()
        return torch.cat([as_bytes(key.contiguous()), inner.encode(chosen, *some)], dim=1)

    def decode(data: Tensor, n: int) -> Tensor:
        at, _ = drawn(read(data[:, :4], torch.int32), n)
        chosen = inner.decode(data[:, 4:], _count(k, n))
        others = poison(chosen).expand(-1, n)
        return others.scatter(1, at, chosen)

    return Codec(encode, decode, lambda n: 4 + inner.width(_count(k, n)), stochastic=True)


def _check_k(k: Any) -> None:
    share = isinstance(k, float) and 0.0 < k <= 1.0
    number = isinstance(k, int) and not isinstance(k, bool) and k >= 1
    if not (share or number):
        raise ValueError(f"k must be a share in (0.0, 1.0] or a whole number, at least 1, got {k!r}")


def _check_values(values: Codec | None) -> Codec:
    return float32() if values is None else check_codec("values", values)


def _count(k: float, n: int) -> int:
    if isinstance(k, float):
        return math.ceil(k * n)
    if n and k > n:
        raise ValueError(
            f"k is {k}, but the row to be encoded has {n} elements; pass a share such as 0.01, or let partition encode large "
            f"leaves only"
        )
    return min(k, n)


def _place_dtype(n: int) -> torch.dtype:
    return torch.int16 if n <= 2**16 else torch.int32
