"""A batch sampler over the steps of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.loading.loaders import Noisy


def test_another_epoch_or_seed_has_another_order() -> None:
    orders = [batches_of(64, 64, epoch, seed=seed) for seed, epoch in ((2, 0), (2, 1), (9, 0), (-1, 0))]
    assert all(sorted(order[0]) == list(range(64)) for order in orders)
    assert len({tuple(order[0]) for order in orders}) == 4
    assert orders[1] == [torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()], (
        "as DistributedSampler"
    )


def batches_of(n: int, size: int, epoch: int, first: int = 0, seed: int = 2, **options: Any) -> list[list[int]]:
    sampler = fjoin.Shuffled(n, size, seed=seed, **options)
    sampler.set_epoch(epoch, first)
    assert first or len(sampler) == len(list(sampler))
    return list(sampler)


@pytest.mark.sample(2)
@pytest.mark.parametrize("n, size", [(0, 4), (1, 4), (12, 4), (13, 4), (14, 5), (29, 7), (30, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_epoch_visits_every_sample_once(n: int, size: int, ranks: int) -> None:
    whole = batches_of(n, size, 1)
    for epoch in (0, 1):
        found = tx.simulate(lambda: batches_of(n, size, epoch), {"data": ranks})  # noqa: B023
        assert sorted(i for rank in found for batch in rank for i in batch) == list(range(n))
    for t in range(n // size + 1):
        step = [i for rank in found for i in (rank[t] if t < len(rank) else [])]
        assert step == (whole[t] if t < len(whole) else []), "a step has the same samples on any number of ranks"
        sizes = [len(rank[t]) if t < len(rank) else 0 for rank in found]
        assert max(sizes) - min(sizes) <= 1
    dropped = tx.simulate(lambda: batches_of(n, size, 1, drop_last=True), {"data": ranks})
    assert {len(rank) for rank in dropped} == {n // size}
    assert [i for batch in zip(*dropped, strict=True) for part in batch for i in part] == sum(whole[: n // size], [])


def consumed(n: int, saved: Any, until: tuple[int, int] | None) -> tuple[list[tuple[int, int]], Any]:
    """Epoch and sample of each batch, from a position to another, and that."""
    loader, seen = DataLoader(Noisy(n), batch_sampler=fjoin.Shuffled(n, 6, seed=1)), list[tuple[int, int]]()
    loop = fjoin.join(loader, mesh=fjoin.mesh({"data": -1}), weight=len, empty=torch.zeros(0, 2))
    if saved is not None:
        loop.load_state_dict(saved)
    for epoch in range(loop.epoch, 2):
        for batch in loop:
            seen += [(epoch, i) for i in batch[:, 0].int().tolist() if loop.weight]
            if until == (epoch, loop._position.steps - 1):
                loop.stop()
                return seen, loop.state_dict()
    return seen, None


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("ranks", [(1, 3), (3, 2), (4, 1), (2, 4)])
def test_another_number_of_ranks_takes_the_samples_that_are_left(n: int, ranks: tuple[int, int]) -> None:
    for until in ((0, 0), (0, 3), (0, 6), (0, 7), (1, 2))[: 5 if n > 42 else 3]:
        first = tx.simulate(lambda u=until: consumed(n, None, u), {"data": ranks[0]})
        for _, saved in first:  # any rank's position will do
            second = tx.simulate(lambda s=saved: consumed(n, s, None), {"data": ranks[1]})
            found = sorted(one for seen, _ in [*first, *second] for one in seen)
            assert found == [(epoch, i) for epoch in (0, 1) for i in range(n)], until


def test_arguments() -> None:
    raises_text(ValueError, lambda: fjoin.Shuffled(-1, 2), "n must", "-1")
    raises_text(TypeError, lambda: fjoin.Shuffled(10, 2, seed=1.5), "seed", "1.5")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: tx.simulate(lambda: fjoin.Shuffled(10, 2), {"data": 3}), "batch_size")
    raises_text(ValueError, lambda: fjoin.Shuffled(10, 2).set_epoch(-1), "epoch", "-1")
