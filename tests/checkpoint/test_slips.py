"""Uses that go wrong in part: interrupts, threads that do not start, warnings as errors, states in turn, several folders."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
from tests.helpers import raises_text

START = {"a": torch.linspace(0, 1, 6), "b": torch.ones(3)}


def make_step(pipeline: tx.Pipeline | None = None) -> fjoin.TrainStep:
    return fjoin.train_step(
        lambda p, x: sum((v * x).square().sum() for v in p.values()), pipeline or tx.fuse(tx.mean("data"), tx.adam(0.1))
    )


def test_a_thread_that_does_not_start_fails_the_save_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    step = make_step()
    state, runs = step.init(START), fjoin.Checkpoints(tmp_path, step, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        runs.save(state)
    state, _ = step(state, torch.ones(()))
    raises_text(fjoin.CheckpointError, runs.wait, "can't start new thread", "step 0 has not been saved")
    assert runs.save(state)
    runs.wait()
    assert not list(tmp_path.glob(".tmp*")) and fjoin.checkpoint.verify(tmp_path) == []


def test_two_folders_of_one_step_both_save_by_the_clock(tmp_path: Path) -> None:
    step = make_step()
    runs = [fjoin.Checkpoints(tmp_path / name, step, every_s=s) for name, s in (("often", 0.05), ("rarely", 0.2))]
    state, saves = step.init(START), [0, 0]
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        state, metrics = step(state, torch.ones(()))
        for i, run in enumerate(runs):
            saves[i] += run.save(state, metrics) is not None
    assert min(saves) >= 3


def test_states_of_other_shapes_are_saved_in_turn(tmp_path: Path) -> None:
    pipeline = tx.zero(tx.mean("data"), tx.adam(0.1), "data")

    def one_rank(rank: int) -> None:
        step = make_step(pipeline)
        runs = fjoin.Checkpoints(tmp_path, step)
        for number, shapes in enumerate(({"a": 6, "b": 3}, {"a": 2, "b": 9}, {"a": 6, "b": 3}), 1):
            state = step.init({path: torch.ones(n) * number for path, n in shapes.items()})
            for _ in range(number):
                state, _ = step(state, torch.ones(()))
            path = runs.save(state)
            assert path is not None and fjoin.checkpoint.verify(path) == []

    tx.simulate(one_rank, {"data": 2}, [0, 1])


def test_warnings_as_errors_part_no_ranks(tmp_path: Path) -> None:
    def one_rank(rank: int) -> str:
        step = make_step()
        state = step.init(START)
        state.params["a"].add_(rank)
        try:
            fjoin.save(tmp_path, step, state)
        except UserWarning as warning:
            return str(warning)
        return "saved"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert "drifted apart" in first and second == "saved" and fjoin.checkpoint.verify(tmp_path) == []


def test_nothing_is_kept_alive_by_a_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gc
    import weakref

    made: list[Any] = []
    copied = _save.copied

    def noted(tensors: Any) -> Any:
        found = copied(tensors)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(_save, "copied", noted)
    step = make_step()
    state, runs = step.init(START), fjoin.Checkpoints(tmp_path, step, background=True)
    storage = weakref.ref(state._body.storage)
    runs.save(state)
    runs.wait()
    gc.collect()
    assert made and not any(one() is not None for one in made)
    del state
    gc.collect()
    assert storage() is None


TELLS = """
import sys, torch, fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
def full(*args): raise OSError(28, "No space left on device")
_save.write_file = full
step = fjoin.train_step(lambda p, x: p["w"].sum() * x, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
fjoin.Checkpoints(sys.argv[1], step, background=True).save(step.init({"w": torch.ones(2)}))
"""


def test_a_save_that_has_failed_unseen_is_told_at_the_end_of_the_program(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TELLS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "step 0 has not been saved" in done.stderr and "No space left" in done.stderr
