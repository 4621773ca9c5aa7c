"""A save in the background holds the values at its call, whatever is written afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint._plan import Copies
from tests.helpers import raises_text

START = {"w": torch.linspace(-1, 1, 300_000), "small": torch.ones(7)}


def make_step(**options: Any) -> fjoin.TrainStep:
    hook = tx.chain(tx.mean("data"), tx.clip_by_global_norm(9.0))
    pipeline = tx.fuse(hook, tx.inject_hyperparameters(tx.adam(0.1)), after=tx.every(3, tx.ema(0.5)))
    return fjoin.train_step(lambda p, x: sum((v * x).square().sum() for v in p.values()), pipeline, **options)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The thread begins to copy late; the times at which it has begun."""
    tensors, began = Copies.tensors, list[float]()

    def late(self: Copies) -> Any:
        time.sleep(0.3)
        began.append(time.monotonic())
        return tensors(self)  # which ends the wait

    monkeypatch.setattr(Copies, "tensors", late)
    return began


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


@pytest.mark.parametrize("what", WRITES)
def test_whatever_writes_waits_for_the_copies(what: str, slow_copies: list[float], tmp_path: Path) -> None:
    step = make_step()
    state, _ = step(step.init(START), torch.ones(()))
    want = state.clone()
    with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
        runs.save(state)
        WRITES[what](step, state)
        assert len(slow_copies) == 1  # it has waited
    again = fjoin.load(tmp_path, make_step(), START)
    for found, expected in (again.params, want.params), (again.pipeline.optimizer, want.pipeline.optimizer):
        one, other = tx.to_state_dict(found), tx.to_state_dict(expected)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_forward_and_backward_pass_do_not_wait(slow_copies: list[float], tmp_path: Path) -> None:
    seen = threading.Event()

    def loss_fn(params: Any, x: Any) -> Any:
        if not slow_copies:
            seen.set()
        return sum((v * x).square().sum() for v in params.values())

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adam(0.1)))
    state, _ = step(step.init(START), torch.ones(()))
    seen.clear()
    with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
        runs.save(state)
        assert not slow_copies
        step(state, torch.ones(()))
        assert seen.is_set() and slow_copies


def test_a_save_that_fails_lets_training_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Copies) -> Any:
        raise MemoryError("no memory for copies")

    monkeypatch.setattr(Copies, "tensors", broken)
    step = make_step()
    state, _ = step(step.init(START), torch.ones(()))
    runs = fjoin.Checkpoints(tmp_path, step, background=True)
    runs.save(state)
    state, _ = step(state, torch.ones(()))
    assert state.step == 2
    raises_text(fjoin.CheckpointError, runs.wait, "no memory for copies", "step 1 has not been saved")
    assert not list(tmp_path.iterdir())


def test_states_that_are_kept_whole_are_not_waited_for(slow_copies: list[float], tmp_path: Path) -> None:
    step = make_step(donate=False)
    state, _ = step(step.init(START), torch.ones(()))
    with fjoin.Checkpoints(tmp_path, step, background=True) as runs:
        runs.save(state)
        step(state, torch.ones(()))
    want = state.params["w"].clone()
    assert torch.equal(fjoin.load(tmp_path, make_step(), START).params["w"], want)
