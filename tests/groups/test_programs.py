"""Ranks that run different programs get an error before the first payload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.training.small import MEAN_SGD, product, step_of

X = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"pipeline": tx.fuse(tx.mean("data"), tx.sgd(0.2))}, ["pipeline", "sgd(lr=0.2)", "sgd(lr=0.1)"]),
        ({"pipeline": tx.fuse(tx.mean("data", over="live"), tx.sgd(0.1))}, ["pipeline", "over='live'"]),
        ({"params": {"w": torch.ones(3)}}, ["parameters", "w: float32[3]", "w: float32[2]"]),
        ({"params": {"w": torch.ones(2, dtype=torch.float64)}}, ["parameters", "float64"]),
        ({"params": {"w": torch.ones(2), "v": torch.ones(1)}}, ["parameters", "2 of them", "1"]),
        ({"settings": {"bucket_bytes": 7}}, ["bucket_bytes", "7"]),
        ({"settings": {"accumulate": 2}}, ["accumulate", "2"]),
        ({"settings": {"weight": len}}, ["weight", "weight(batch)", "1 for each rank"]),
        ({"buffers": {"n": torch.ones(1)}}, ["buffers"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_another_program_on_one_rank(change: dict[str, Any], texts: list[str]) -> None:
    def one_rank(odd: bool) -> str:
        mine = change if odd else {}
        step = fjoin.train_step(product, mine.get("pipeline", MEAN_SGD), **mine.get("settings", {}))
        return raises_text(
            fjoin.DesyncError,
            lambda: step.init(mine.get("params", {"w": torch.ones(2)}), mine.get("buffers")), "Nothing has been sent", *texts,
        )  # fmt: skip

    for text in tx.simulate(one_rank, {"data": 3}, [False, True, False]):
        assert text.startswith("rank 1 differs from rank 0 in its")


def test_other_names_of_sums_on_one_rank() -> None:
    def one_rank(name: str) -> str:
        step, state = step_of(lambda p, b: (product(p, b), {"sum": {name: 1}}))
        return raises_text(fjoin.DesyncError, lambda: step(state, X), "['a']", "['b']", "on rank 1")

    tx.simulate(one_rank, {"data": 2}, ["a", "b"])
    step, state = step_of(lambda p, b: (product(p, b), {"sum": {f"n{len(seen)}": seen.append(1) or 1}}))
    seen: list[int] = []
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step(state, X), "['n1']", "['n0']", "must stay the same")
