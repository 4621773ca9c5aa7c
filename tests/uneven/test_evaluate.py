"""Evaluation over uneven shards equals one process on all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

SHARDS = [[[3, 1, 4], []], [[5], [2, 2], [1]], [[], [7, 3], []]]


def samples(shards: list[list[int]]) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [[torch.randn(n, 3, generator=g, dtype=torch.float64) for n in own] for own in shards]


def metrics(batch: torch.Tensor) -> dict[str, Any]:
    right = (batch.sum(1) > 0).double()
    return {"accuracy": right.mean(), "by column": batch.mean(0), "sum": {"right": right.sum(), "n": len(batch)}}


def one_rank(mine: list[torch.Tensor]) -> Any:
    out = fjoin.evaluate(metrics, mine, weight=len)
    return out.means["accuracy"], out.means["by column"].tolist(), out.sums, out.weight, out.batches


def on_processes(shards: list[list[int]]) -> Any:
    first = one_rank(samples(shards)[dist.get_rank()])
    assert one_rank(samples(shards)[dist.get_rank()]) == first, "a second evaluation meets anew"
    return first


@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_every_sample_counts_once(pool: Any, shards: list[list[int]]) -> None:
    all_samples = torch.cat([batch for own in samples(shards) for batch in own])
    right = (all_samples.sum(1) > 0).double()
    results = tx.simulate(one_rank, {"data": len(shards)}, samples(shards))
    assert results == pool.run(len(shards), on_processes, shards), "simulated and real"
    for accuracy, columns, sums, weight, batches in results:
        assert (accuracy, columns, sums, weight) == results[0][:4]
        assert abs(accuracy - right.mean().item()) < 1e-12
        assert torch.allclose(torch.tensor(columns, dtype=torch.float64), all_samples.mean(0), rtol=0, atol=1e-12)
        assert sums == {"right": right.sum().item(), "n": len(all_samples)} and weight == len(all_samples)
        assert batches == sum(map(len, shards))


def test_no_batch_at_all_and_weight_zero() -> None:
    assert fjoin.evaluate(metrics, []) == ({}, {}, 0.0, 0)
    out = fjoin.evaluate(lambda x: {"m": x}, [1.0, float("nan")], weight=lambda x: float(x == x))
    assert out.means == {"m": 1.0} and out.weight == 1
    exact = fjoin.evaluate(lambda x: {"m": 0.1, "sum": {"n": 2**53 - 1}, "none": torch.ones(0, 3)}, [1])
    assert exact.means["m"] == 0.1 and exact.sums["n"] == 2**53 - 1 and exact.means["none"].shape == (0, 3)


def test_raises_on_bad_input() -> None:
    raises_text(TypeError, lambda: fjoin.evaluate(lambda x: x, [1.0]), "name -> mean")  # type: ignore[arg-type,return-value]
    raises_text(ValueError, lambda: fjoin.evaluate(lambda x: {str(x): x}, [1.0, 2.0]), "'2.0'", "'1.0'")
    raises_text(ValueError, lambda: fjoin.evaluate(lambda x: {"m": x}, [1.0], weight=lambda x: -1), "not negative")

    for value, texts in (
        ("x", ["'m'", "'x'"]), (None, ["'m'", "None"]), (1j, ["1j"]), (torch.tensor(1j), ["tensor"]),
    ):  # fmt: skip
        raises_text(TypeError, lambda value=value: fjoin.evaluate(lambda x: {"m": value}, [1.0]), *texts)
    raises_text(TypeError, lambda: fjoin.evaluate(lambda x: {1: x}, [1.0]), "string", "1")  # type: ignore[dict-item]
    raises_text(TypeError, lambda: fjoin.evaluate(lambda x: {"sum": x}, [1.0]), "'sum'", "1.0")
    raises_text(ValueError, lambda: fjoin.evaluate(lambda x: {"m": torch.ones(x)}, [1, 2]), "'m'", "(2,)", "(1,)")

    def other_names(name: str) -> str:
        return raises_text(
            fjoin.DesyncError, lambda: fjoin.evaluate(lambda x: {name: x}, [1.0]), "rank 1", "'b'", "'a'"
        )

    tx.simulate(other_names, {"data": 2}, ["a", "b"])
