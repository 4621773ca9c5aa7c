"""Permutations of many numbers, each of which is computed by itself."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 12  # fewer leave some orders of four and five numbers more frequent than others
_MASK = 2**64 - 1


def _mixed(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64 bits."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def keys_of(seed: int, epoch: int) -> Tensor:
    """The keys of a permutation, (rounds + 1,) int64."""
    key = _mixed((_mixed(seed & _MASK) + epoch * 0x9E3779B97F4A7C15) & _MASK)
    keys = (_mixed((key + i * 0x9E3779B97F4A7C15) & _MASK) for i in range(1, _ROUNDS + 2))
    return torch.tensor([k - 2**64 if k >= 2**63 else k for k in keys], dtype=torch.int64)


def permute(positions: Tensor, n: int, keys: Tensor) -> Tensor:
    """The numbers at these positions of a permutation of 0 ... n - 1.

    A Feistel network on the smallest even number of bits that holds n, walked along its cycle until the number is below n.
    The network alone gives even permutations, so one key tells whether 0 and 1 change places.

    Args:
        positions: int64, each from 0 to n - 1.
        keys: (rounds + 1, ...) int64; the further dims broadcast with those of `positions`.

    Returns:
        A tensor of int64 with the broadcast shape.

    Source: Black, Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.

    >>> permute(torch.arange(6), 6, keys_of(0, 0)).sort().values.tolist()
    [0, 1, 2, 3, 4, 5]
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    out = positions.broadcast_to(torch.broadcast_shapes(positions.shape, keys.shape[1:]))
    outside = torch.ones_like(out, dtype=torch.bool)
    while bool(outside.any()):
        left, right = out >> half, out & low
        for key in keys[1:]:
            left, right = right, left ^ (_hashed(right, key) & low)
        new = left << half | right
        new = torch.where(new < 2, new ^ (keys[0] & 1), new)
        out = torch.where(outside, new, out)
        outside = out >= n
    return out


def _hashed(x: Tensor, key: Tensor) -> Tensor:
    """Bits that depend on all bits of x and the key; products of int64 wrap around."""
    x = (x ^ key) * -0x61C8864680B583EB
    x = (x ^ (x >> 32)) * -0x4B47D0C5A1A6F4D3
    return x ^ (x >> 32)
