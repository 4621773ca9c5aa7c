"""Uneven inputs: equal to one process on all batches together, on simulated and on real ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.oracle.whole_batch import make_batches, make_model, parameters, train
from tests.reducer.one_rank import train_one_rank
from tests.traffic import watched

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "momentum": (
        lambda: tx.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (lambda: tx.adam(0.01, amsgrad=True), lambda p: torch.optim.Adam(p, 0.01, amsgrad=True)),
    "adamw": (lambda: tx.adamw(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
}  # fmt: skip
MODES = ["weight", "live", "world"]


def _case(seed: int, ranks: int = 0) -> tuple[list[list[int]], str, str, bool]:
    """Sizes of the batches of each rank, optimizer, divisor, and whether to clip."""
    draw = random.Random(seed)
    sizes = [[draw.randint(1, 6) for _ in range(draw.randint(0, 9))] for _ in range(draw.randint(1, 5))]
    case = draw.choice(list(OPTIMIZERS)), draw.choice(MODES), draw.random() < 0.3
    return [sizes[i % len(sizes)] for i in range(ranks or len(sizes))], *case


def _pipeline(name: str, over: Any, clip: bool) -> tx.Pipeline:
    hook = tx.mean("data", over=over)
    return tx.fuse(tx.chain(hook, tx.clip_by_global_norm(0.5)) if clip else hook, OPTIMIZERS[name][0]())


def _check(results: list[dict[str, Any]], sizes: Any, seed: int, name: str, over: str, clip: bool) -> None:
    """Three epochs against those of one process."""
    model, losses = make_model(), list[float]()
    start, optimizer = parameters(model), OPTIMIZERS[name][1](model.parameters())
    for _ in range(3):
        losses += train(model, optimizer, make_batches(seed, sizes), over, clip=0.5 if clip else None)
    first, steps = results[0], max((len(s) for s in sizes), default=0) * 3
    for result in results:
        assert result["calls"] == steps
        assert same_bits(result["params"], first["params"]) and same_bits(result["optimizer"], first["optimizer"])
        assert result["digests"] == first["digests"] and len(first["digests"]) == steps
        assert result["losses"] == first["losses"]
    assert first["losses"] == pytest.approx(losses, abs=1e-12)
    moved = {path: p - start[path] for path, p in first["params"].items()}
    assert max_diff(moved, {path: p - start[path] for path, p in parameters(model).items()}) < 1e-12


@pytest.mark.parametrize("block", [pytest.param(i, marks=pytest.mark.long if i else ()) for i in range(50)])
def test_a_thousand_simulated_cases(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        sizes, name, over, clip = _case(seed)
        batches = make_batches(seed, sizes)
        pipeline = _pipeline(name, over, clip)
        results = tx.simulate(lambda b: train_one_rank(b, pipeline, 3, check=True), {"data": len(sizes)}, batches)  # noqa: B023
        _check(results, sizes, seed, name, over, clip)


def gloo_cases(seeds: list[int]) -> list[dict[str, Any]]:
    """Each case on this rank, with the number of sums that torch.distributed was asked for."""
    out = []
    for seed in seeds:
        sizes, optimizer, over, clip = _case(seed, dist.get_world_size())
        batches = make_batches(seed, sizes)[dist.get_rank()]
        with watched() as sent:
            out.append(train_one_rank(batches, _pipeline(optimizer, over, clip), 3, check=True))
        out[-1]["asked"] = sum(one.name in ("all_reduce", "all_to_all_single") for one in sent)
    return out


@pytest.mark.gloo
@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_thirty_cases_on_gloo(pool: Any, ranks: int) -> None:
    seeds = [2000 + 10 * ranks + i for i in range(10)]
    results = pool.run(ranks, gloo_cases, seeds)
    for i, seed in enumerate(seeds):
        sizes, name, over, clip = _case(seed, ranks)
        _check([result[i] for result in results], sizes, seed, name, over, clip)
        steps = max((len(s) for s in sizes), default=0)
        # This model is one bucket: one message a step, and one at the start of each epoch.
        assert {result[i]["asked"] for result in results} == {3 * (1 + steps)}


def ordered_case(seed: int, ranks: int) -> dict[str, Any]:
    sizes = [[3, 2, 4], [5], [], [1, 1]][:ranks]
    batches = make_batches(seed, sizes, torch.float32)[dist.get_rank()]
    return train_one_rank(batches, _pipeline("adamw", "weight", True), ordered=True, dtype=torch.float32)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gloo_in_rank_order_equals_the_simulation_to_the_bit(pool: Any, ranks: int) -> None:
    real = pool.run(ranks, ordered_case, 7, ranks)
    sizes = [[3, 2, 4], [5], [], [1, 1]][:ranks]
    pipeline = _pipeline("adamw", "weight", True)
    simulated = tx.simulate(
        lambda b: train_one_rank(b, pipeline, dtype=torch.float32),
        {"data": ranks},
        make_batches(7, sizes, torch.float32),
    )
    for a, b in zip(real, simulated, strict=True):
        assert same_bits(a["params"], b["params"]) and same_bits(a["optimizer"], b["optimizer"])
        assert a["losses"] == b["losses"]
