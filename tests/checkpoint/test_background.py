"""A save in the background holds the values at its call, whatever is written afterwards; one that fails is told, and costs nothing else."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
from tests.helpers import raises_text, same_bits

START = {"w": torch.linspace(-1, 1, 300_000), "small": torch.ones(7)}


def make_step(**options: Any) -> fjoin.TrainStep:
    hook = tx.chain(tx.mean("data"), tx.clip_by_global_norm(9.0))
    pipeline = tx.fuse(hook, tx.inject_hyperparameters(tx.adam(0.1)), after=tx.every(3, tx.ema(0.5)))
    return fjoin.train_step(lambda p, x: sum((v * x).square().sum() for v in p.values()), pipeline, **options)


def begun(**options: Any) -> tuple[fjoin.TrainStep, fjoin.TrainState]:
    step = make_step(**options)
    return step, step(step.init(START), torch.ones(()))[0]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread writes once this is set."""
    write, gate = _save.write_file, threading.Event()

    def late(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    monkeypatch.setattr(_save, "write_file", late)
    yield gate
    gate.set()


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "a step": lambda step, state: step(state, torch.ones(())),
    "a flush": lambda step, state: step.flush(state),
    "other hyperparameters": lambda step, state: state.with_hyperparameters(lr=5.0),
    "the user": lambda step, state: state.params["w"].fill_(7.0),
    "the user, in the optimizer's state": lambda step, state: state.pipeline.optimizer["w"].inner.exp_avg.fill_(7.0),
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_after_the_call_is_not_saved(
    what: str, donate: bool, gate: threading.Event, tmp_path: Path
) -> None:
    step, state = begun(donate=donate)
    want = state.clone()
    with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
        runs.save(state)
        WRITES[what](step, state)  # it waits for nothing
        gate.set()
    again = fjoin.load(tmp_path, make_step(), START)
    assert same_bits(again.params, want.params) and same_bits(again.pipeline.optimizer, want.pipeline.optimizer)


def no_memory(*args: Any) -> Any:
    raise MemoryError("no memory to write")


def no_thread(self: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("of", "name", "fault", "words"),
    [(_save, "write_file", no_memory, "no memory to write"), (threading.Thread, "start", no_thread, "can't start new thread")],
)  # fmt: skip
def test_a_save_that_fails_lets_training_go_on(
    of: Any, name: str, fault: Any, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, state = begun()
    runs = fjoin.Checkpoints(tmp_path, step, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, fault)
        runs.save(state)
        state, _ = step(state, torch.ones(()))
        raises_text(fjoin.CheckpointError, runs.wait, words, "step 1 has not been saved")
    assert state.step == 2 and not list(tmp_path.iterdir())
    assert runs.save(state)
    runs.wait()
    assert fjoin.checkpoint.verify(tmp_path) == []


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


@pytest.fixture
def rank_1_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    write = _save.write_file

    def full(path: Path, *args: Any) -> Any:
        if "rank-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(_save, "write_file", full)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_is_an_error_on_all(background: bool, rank_1_is_full: None, tmp_path: Path) -> None:
    def run() -> str:
        step, state = begun()
        runs = fjoin.Checkpoints(tmp_path, step, background=background)

        def save() -> None:
            runs.save(state)
            runs.wait()

        return raises_text(fjoin.CheckpointError, save, "No space left", "step 1")

    tx.simulate(run, {"data": 2})
    assert not list(tmp_path.iterdir())


def test_a_save_that_never_ends_is_given_up_after_an_error_of_the_loop(rank_1_is_full: None, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1."""

    def run() -> None:
        step, state = begun()
        with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
            runs.save(state)
            raise RuntimeError("of the loop")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="of the loop"):
        tx.simulate(run, {"data": 2})
    assert time.monotonic() - began < 30 and not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "fjoin save"]


def test_nothing_is_kept_alive_by_a_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []
    copied = _save.copied

    def noted(tensors: Any) -> Any:
        found = copied(tensors)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(_save, "copied", noted)
    step, state = begun()
    runs = fjoin.Checkpoints(tmp_path, step, background=True)
    storage = weakref.ref(state._body.storage)
    runs.save(state)
    runs.wait()
    gc.collect()
    assert made and not any(one() is not None for one in made)
    del state
    gc.collect()
    assert storage() is None
