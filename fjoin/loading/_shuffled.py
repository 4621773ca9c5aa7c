"""Samples in an order that any number of ranks shares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from ..groups import Mesh, mesh_or_world
from ..transforms.base import checks


class Shuffled(Sampler[list[int]]):
    """A batch sampler over the steps of all ranks: step t takes the positions t B to (t + 1) B of the epoch's order.

    The order is that of torch's DistributedSampler: `torch.randperm` by the seed + the epoch. The positions of a step
    are cut among the ranks, in parts whose sizes differ by at most one. So each epoch visits every sample once over all
    ranks, for any number of ranks, and a run that continues on another number of ranks after a step still does.

    Use it in a joined loop, which sets the epoch and the step: `step.join(DataLoader(dataset,
    batch_sampler=Shuffled(...)))`. The last step of an epoch may have fewer samples. A rank that gets none of them
    takes part with weight 0, so pass `weight` to `train_step`.

    Args:
        n: The number of samples of the dataset.
        batch_size: The number of samples of a step on all ranks together, at least one for each rank.
        seed: The same on all ranks. Their first loop compares the arguments.
        mesh: The ranks; by default all ranks.
        drop_last: Whether to leave out a last step with fewer samples.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Same as: torch's DistributedSampler in a BatchSampler; that repeats or drops samples to give all ranks the same
    number.

    >>> [len(batch) for batch in fjoin.Shuffled(10, 4)]
    [4, 4, 2]
    >>> sorted(sample for batch in fjoin.Shuffled(10, 4, seed=3) for sample in batch)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self, n: int, batch_size: int, seed: int = 0, *, mesh: Mesh | None = None, drop_last: bool = False
    ) -> None:
        checks.whole_number("n", n, 0)
        mesh = mesh_or_world("Shuffled", mesh)
        checks.whole_number("batch_size", batch_size, mesh.size)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number, got {seed!r}")
        checks.flag("drop_last", drop_last)
        self._n, self._batch_size, self._seed = n, batch_size, seed
        self._rank, self._ranks, self._drop_last = mesh.rank, mesh.size, drop_last
        self._epoch = self._step = 0

    def __repr__(self) -> str:
        return f"fjoin.Shuffled({self._n}, {self._batch_size}, seed={self._seed}, drop_last={self._drop_last})"

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Let the next `iter` begin at a step of an epoch. A joined loop calls it."""
        checks.whole_number("epoch", epoch, 0)
        checks.whole_number("step", step, 0)
        self._epoch, self._step = epoch, step

    @property
    def steps(self) -> int:
        """The number of steps of an epoch, on all ranks."""
        return self._n // self._batch_size + bool(self._n % self._batch_size and not self._drop_last)

    def part(self, step: int) -> range:
        """The positions of this rank in a step."""
        start, end = step * self._batch_size, min((step + 1) * self._batch_size, self._n)
        size = 0 if self._drop_last and end - start < self._batch_size else max(0, end - start)
        return range(start + self._rank * size // self._ranks, start + (self._rank + 1) * size // self._ranks)

    def __len__(self) -> int:
        """The number of this rank's batches in an epoch."""
        return self._n // self._batch_size + bool(self.part(self._n // self._batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        # Not on the default device, whose generators give other orders.
        generator = torch.Generator("cpu").manual_seed(self._seed + self._epoch)
        order, step = torch.randperm(self._n, generator=generator, device="cpu"), self._step
        while part := self.part(step):
            yield order[part.start : part.stop].tolist()
            step += 1
