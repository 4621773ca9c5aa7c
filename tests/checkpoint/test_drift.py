"""Replicas that have drifted apart, and pipelines with other arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx

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


def test_another_learning_rate_is_reported_and_taken(tmp_path: Path) -> None:
    ranks(tmp_path, False)
    with pytest.warns(UserWarning, match=r"lr=0.1.*lr=0.2") as found:
        ranks(tmp_path, False, lr=0.2)
    assert len(found) == 1
