"""Samples in an order that any number of ranks shares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..groups import Mesh, mesh_or_world
from ..transforms.base import flag, whole_number

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


class Shuffled(Sampler[list[int]]):
    """A batch sampler over the steps of all ranks: step t takes the positions t B to (t + 1) B of the epoch's order.

    The order is a permutation of all samples by the seed and the epoch, computed where it is needed. The positions of a step
    are cut among the ranks, in parts whose sizes differ by at most one. So each epoch visits every sample once over all ranks, for any
    number of ranks, and a run that continues on another number of ranks after a step still does.

    Use it in a joined loop, which sets the epoch and the step: `step.join(DataLoader(dataset, batch_sampler=Shuffled(...)))`.
    The last step of an epoch may have fewer samples. A rank that gets none of them takes part with weight 0, so pass `weight`
    to `train_step`.

    Args:
        n: The number of samples of the dataset.
        batch_size: The number of samples of a step on all ranks together, at least one for each rank.
        seed: The same on all ranks.
        mesh: The ranks; by default all ranks.
        drop_last: Whether to leave out a last step with fewer samples.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Same as: torch's DistributedSampler in a BatchSampler; that repeats or drops samples to give all ranks the same number.

    >>> [len(batch) for batch in fjoin.Shuffled(10, 4)]
    [4, 4, 2]
    >>> sorted(sample for batch in fjoin.Shuffled(10, 4, seed=3) for sample in batch)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self, n: int, batch_size: int, seed: int = 0, *, mesh: Mesh | None = None, drop_last: bool = False
    ) -> None:
        whole_number("n", n, 0)
        mesh = mesh_or_world("Shuffled", mesh)
        whole_number("batch_size", batch_size, mesh.size)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number, got {seed!r}")
        flag("drop_last", drop_last)
        self._n, self._batch_size, self._seed = n, batch_size, seed
        self._rank, self._ranks, self._drop_last = mesh.rank, mesh.size, drop_last
        self._epoch = self._step = 0

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Let the next `iter` begin at a step of an epoch. A joined loop calls it."""
        whole_number("epoch", epoch, 0)
        whole_number("step", step, 0)
        self._epoch, self._step = epoch, step

    def _part(self, step: int) -> range:
        """The positions of this rank in a step."""
        start, end = step * self._batch_size, min((step + 1) * self._batch_size, self._n)
        size = 0 if self._drop_last and end - start < self._batch_size else max(0, end - start)
        return range(start + self._rank * size // self._ranks, start + (self._rank + 1) * size // self._ranks)

    def __len__(self) -> int:
        """The number of this rank's batches in an epoch."""
        return self._n // self._batch_size + bool(self._part(self._n // self._batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        step, keys = self._step, keys_of(self._seed, self._epoch)
        while part := self._part(step):
            yield permute(torch.arange(part.start, part.stop), self._n, keys).tolist()
            step += 1
