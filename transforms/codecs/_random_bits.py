"""Random bits for stochastic codecs: equal for equal positions in a leaf, in every bucket layout."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..tree._tree import to_device

Key = tuple[int, int]  # seed, step

_GOLDEN = -1640531527  # 2**32 / the golden ratio, as an int32


class Noise(NamedTuple):
    """The source of random bits for `Codec.encode` of a stochastic codec.

    positions: (rows, n) int32, a number for each float, computed from its path and its offset in the leaf.
    own: 0-d int32, a key that differs between seeds, steps, ranks and messages.
    common: 0-d int32, a key that differs between seeds and steps only.

    >>> noise = Noise(torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor(7), torch.tensor(1))
    >>> noise.uniform()
    tensor([[0.5803, 0.9153, 0.2603, 0.7209]])
    """

    positions: Tensor
    own: Tensor
    common: Tensor

    def uniform(self) -> Tensor:
        """(rows, n) float32 in [0, 1), independent for each position and each `own`."""
        bits = hash32_(self.positions + self.own.to(torch.int32))
        return bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def hash32_(h: Tensor) -> Tensor:
    """Hashes int32 to int32 in place, one to one: each bit depends on all bits.

    Source: C. Wellons, lowbias32, of his hash-prospector.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, -2073254261)):
        h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def places_of(leaves: Mapping[str, Tensor], device: torch.device | None = None) -> Tensor:
    """(n,) int32: a number for each element of each leaf, computed from its path and its offset in the leaf."""
    each = [
        torch.arange(leaf.numel(), dtype=torch.int32, device=device) * _GOLDEN + _signed(zlib.crc32(path.encode()))
        for path, leaf in leaves.items()
    ]
    return torch.cat(each) if each else torch.zeros(0, dtype=torch.int32, device=device)


def key_of(key: Key, *folded: int | Tensor, device: torch.device | None = None) -> Tensor:
    """A 0-d int32 key: a hash of the seed, the step, and the `folded` numbers."""
    seed, step = key
    out = torch.full((), _signed(seed ^ (seed >> 32)), dtype=torch.int32, device=device)
    for part in (step, *folded):
        part = to_device(device, part, torch.int32) if isinstance(part, Tensor) else _signed(part)
        out = hash32_(out * _GOLDEN + part + 1)
    return out


def _signed(n: int) -> int:
    """The last 32 bits, as an int32."""
    return (n & 0xFFFFFFFF) - ((n & 0x80000000) << 1)
