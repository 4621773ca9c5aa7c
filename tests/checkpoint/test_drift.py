"""Replicas that have drifted apart, and pipelines with other arguments."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

START = {"w": torch.ones(3), "b": torch.zeros(2)}


def pipeline(lr: float = 0.1) -> tx.Pipeline:
    return tx.fuse(tx.mean("data"), tx.sgd(lr, momentum=0.9))


def run(rank: int, folder: Path, drifts: bool, lr: float = 0.1, **options: Any) -> Any:
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), pipeline(lr))
    runs = fjoin.Checkpoints(folder, step, **options)
    state = runs.restore(START)
    state, _ = step(state, torch.ones(3))
    if drifts and rank == 1:
        state.params["w"].add_(1e-3)
    runs.save(state)
    last = {path: p.clone() for path, p in state.params.items()}
    step.close()
    return last


def ranks(*args: Any, **options: Any) -> Any:
    return tx.simulate(lambda rank: run(rank, *args, **options), {"data": 3}, [0, 1, 2])


def test_a_drift_is_noted_and_never_costs_the_checkpoint(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="params.w of rank 1 differs from that of rank 0"):
        saved = ranks(tmp_path, True)
    assert "params.w of rank 1" in (tmp_path / "step-00000001" / "manifest.json").read_text()
    step = fjoin.train_step(lambda p, x: p["w"].sum(), pipeline())

    def restored(rank: int) -> Any:
        return (
            fjoin.Checkpoints(tmp_path, fjoin.train_step(lambda p, x: p["w"].sum(), pipeline())).restore(START).params
        )

    for params in tx.simulate(restored, {"data": 3}, [0, 1, 2]):  # healed
        assert torch.equal(params["w"], saved[0]["w"])
    step.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, -3.5, 1e-3, 0.0])
def test_a_drift_is_measured_in_units_of_the_last_place(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    def one_rank(rank: int) -> None:
        step = fjoin.train_step(lambda p, x: p["w"].sum(), pipeline())
        state = step.init({"w": torch.full((4,), value, dtype=dtype), "same": torch.ones(2)})
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        state.params["w"].view(words)[2] += 3 * rank  # the next number has the next bits
        fjoin.save(tmp_path, step, state)

    with pytest.warns(UserWarning, match="have drifted apart") as warned:
        tx.simulate(one_rank, {"data": 2}, [0, 1])
    text = str(warned[0].message)
    assert "params.same" not in text and float(text.split("by up to ")[1].split()[0]) == 3


def test_values_that_are_not_finite_on_one_rank_are_infinitely_far_apart(tmp_path: Path) -> None:
    def one_rank(rank: int) -> None:
        step = fjoin.train_step(lambda p, x: p["w"].sum(), pipeline())
        state = step.init(START)
        state.params["w"][0] = float("nan") if rank else 1.0
        fjoin.save(tmp_path, step, state)

    with pytest.warns(UserWarning, match=r"params.w of rank 1 differs from that of rank 0 by up to inf ulp"):
        tx.simulate(one_rank, {"data": 2}, [0, 1])


def test_strict_replicas_raise_once_they_are_saved(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raises_text(
            fjoin.CheckpointError, lambda: ranks(tmp_path, True, replicas="strict"), "is saved", "params.w of rank 1"
        )
    assert (tmp_path / "step-00000001" / "COMMIT").exists()
    raises_text(ValueError, lambda: ranks(tmp_path, True, replicas="never"), "replicas", "'never'")


def test_another_learning_rate_is_reported_and_taken(tmp_path: Path) -> None:
    ranks(tmp_path, False)
    with pytest.warns(UserWarning, match=r"lr=0.1.*lr=0.2") as found:
        ranks(tmp_path, False, lr=0.2)
    assert len(found) == 1
