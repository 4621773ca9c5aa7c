"""A batch sampler over the steps of all ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fjoin
from fjoin import transforms as tx
from fjoin.loading._shuffled import keys_of, permute
from tests.helpers import raises_text
from tests.loading.loaders import Noisy


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_all_orders_of_a_few_numbers_are_equally_frequent(n: int) -> None:
    """Over seeds and over epochs: chi-squared within six standard deviations of its mean."""
    orders = {order: i for i, order in enumerate(itertools.permutations(range(n)))}
    draws = 40 * len(orders)
    for by in ("seed", "epoch"):
        keys = torch.stack([keys_of(i, 3) if by == "seed" else keys_of(3, i) for i in range(draws)], 1)[..., None]
        found = permute(torch.arange(n)[None], n, keys)
        assert found.shape == (draws, n)
        counts = torch.zeros(len(orders))
        for order in found.tolist():
            counts[orders[tuple(order)]] += 1
        chi2, dof = float(((counts - 40) ** 2 / 40).sum()), len(orders) - 1
        assert abs(chi2 - dof) <= 6 * math.sqrt(2 * dof), (by, chi2, dof)


@pytest.mark.parametrize("n", [7, 16, 17, 64, 65, 1000, 4097])
def test_a_permutation_of_many_numbers(n: int) -> None:
    seen = [
        permute(torch.arange(n), n, keys_of(seed, epoch)).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0), (-1, 0))
    ]
    assert all(sorted(one) == list(range(n)) for one in seen)
    assert len({tuple(one) for one in seen}) == len(seen)
    apart = permute(torch.tensor([n - 1]), n, keys_of(0, 0)).tolist()
    assert apart == seen[0][-1:], "each number by itself"
    # Where a number ends tells nothing of where it began.
    if n >= 1000:
        x, y = torch.arange(n, dtype=torch.float64), torch.tensor(seen[0], dtype=torch.float64)
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 6 / math.sqrt(n)
        assert sum(a + 1 == b for a, b in itertools.pairwise(seen[0])) < 12


def test_a_billion_samples_take_no_memory() -> None:
    start = next(iter(fjoin.Shuffled(10**9, 256)))
    assert len(set(start)) == 256 and max(start) > 10**8


def batches_of(n: int, size: int, epoch: int, first: int = 0, **options: Any) -> list[list[int]]:
    sampler = fjoin.Shuffled(n, size, seed=2, **options)
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


def consumed(n: int, saved: Any, until: tuple[int, int] | None) -> tuple[list[tuple[int, int, list[int]]], Any]:
    """The samples of each step, from a position to another; then the run stops."""
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b[:, 0]).sum(),
        tx.fuse(tx.mean("data"), tx.sgd(0.0)),
        weight=len,
        mesh=fjoin.mesh({"data": -1}),
    )
    state = step.init({"w": torch.ones((), dtype=torch.float64)})
    loop = step.join(DataLoader(Noisy(n), batch_sampler=fjoin.Shuffled(n, 6, seed=1)), empty=torch.zeros(0, 2))
    if saved is not None:
        loop.load_state_dict(saved)
    seen: list[tuple[int, int, list[int]]] = []
    for epoch in range(loop.epoch, 2):
        for batch in loop:
            before = state.batches
            state, _ = step(state, batch)
            at = loop._position.steps - 1
            if state.batches > before:
                seen.append((epoch, at, batch[:, 0].int().tolist()))
            if until == (epoch, at):
                loop.stop()
                saved = loop.state_dict()
                break
        else:
            continue
        break
    return seen, saved


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("ranks", [(1, 3), (3, 2), (4, 1), (2, 4)])
def test_another_number_of_ranks_takes_the_samples_that_are_left(n: int, ranks: tuple[int, int]) -> None:
    for until in ((0, 0), (0, 3), (0, 6), (0, 7), (1, 2)):
        if until[1] * 6 >= n:
            continue
        first = tx.simulate(lambda u=until: consumed(n, None, u), {"data": ranks[0]})
        for one in range(ranks[0]):  # any rank's position will do
            saved = first[one][1]
            second = tx.simulate(lambda s=saved: consumed(n, s, None), {"data": ranks[1]})
            for epoch in (0, 1):
                found = [i for seen, _ in [*first, *second] for e, _, batch in seen if e == epoch for i in batch]
                assert sorted(found) == list(range(n)), (until, epoch)


def test_arguments() -> None:
    raises_text(ValueError, lambda: fjoin.Shuffled(10, 0), "batch_size", "0")
    raises_text(ValueError, lambda: fjoin.Shuffled(-1, 2), "n must", "-1")
    raises_text(TypeError, lambda: fjoin.Shuffled(10, 2, seed=1.5), "seed", "1.5")  # type: ignore[arg-type]
    raises_text(ValueError, lambda: tx.simulate(lambda: fjoin.Shuffled(10, 2), {"data": 3}), "batch_size")
    raises_text(ValueError, lambda: fjoin.Shuffled(10, 2).set_epoch(-1), "epoch", "-1")
