"""A save in the background holds the values at its call, whatever is written afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
from tests.helpers import raises_text

START = {"w": torch.linspace(-1, 1, 300_000), "small": torch.ones(7)}


def make_step(**options: Any) -> fjoin.TrainStep:
    hook = tx.chain(tx.mean("data"), tx.clip_by_global_norm(9.0))
    pipeline = tx.fuse(hook, tx.inject_hyperparameters(tx.adam(0.1)), after=tx.every(3, tx.ema(0.5)))
    return fjoin.train_step(lambda p, x: sum((v * x).square().sum() for v in p.values()), pipeline, **options)


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


def write_params(step: Any, state: Any) -> Any:
    state.params["w"].fill_(7.0)
    return state


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "a step": lambda step, state: step(state, torch.ones(()))[0],
    "a flush": lambda step, state: step.flush(state),
    "other hyperparameters": lambda step, state: state.with_hyperparameters(lr=5.0),
    "the user": write_params,
    "the user, in the optimizer's state": lambda step, state: (
        state.pipeline.optimizer["w"].inner.exp_avg.fill_(7.0) is None or state
    ),
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_after_the_call_is_not_saved(
    what: str, donate: bool, gate: threading.Event, tmp_path: Path
) -> None:
    step = make_step(donate=donate)
    state, _ = step(step.init(START), torch.ones(()))
    want = state.clone()
    with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
        runs.save(state)
        WRITES[what](step, state)  # it waits for nothing
        gate.set()
    again = fjoin.load(tmp_path, make_step(), START)
    for found, expected in (again.params, want.params), (again.pipeline.optimizer, want.pipeline.optimizer):
        one, other = tx.to_state_dict(found), tx.to_state_dict(expected)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_save_that_fails_lets_training_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: Any) -> Any:
        raise MemoryError("no memory to write")

    monkeypatch.setattr(_save, "write_file", broken)
    step = make_step()
    state, _ = step(step.init(START), torch.ones(()))
    runs = fjoin.Checkpoints(tmp_path, step, background=True)
    runs.save(state)
    state, _ = step(state, torch.ones(()))
    assert state.step == 2
    raises_text(fjoin.CheckpointError, runs.wait, "no memory to write", "step 1 has not been saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_tensors_of_every_kind_are_copied(background: bool, tmp_path: Path) -> None:
    """Small ones of one dtype are copied together."""
    extra = {
        "views": [torch.arange(12.0).view(3, 4).T, torch.arange(70_000.0)[::7], torch.ones(3).expand(2, 3)],
        "odd": [
            torch.tensor(3),
            torch.zeros(0, 2),
            torch.tensor([1 + 2j]).conj(),
            torch.ones(70_000, dtype=torch.int8),
        ],
        "half": [torch.ones(5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float8_e4m3fn)],
    }
    runs = fjoin.Checkpoints(tmp_path, {"model": torch.nn.Linear(1, 1)}, background=background)
    runs.save(1, extra=extra)
    runs.restore()
    for name, values in extra.items():
        for value, found in zip(values, runs.extra[name], strict=True):
            assert found.dtype is value.dtype and found.shape == value.shape
            assert torch.equal(found.to(torch.complex64), value.to(torch.complex64))
