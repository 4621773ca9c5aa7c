"""When a run saves, and what becomes of its folder: signals, the clock, and a step of one's choice."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import verify

START = {"w": torch.linspace(-1, 1, 6), "b": torch.zeros(())}


def make_step() -> fjoin.TrainStep:
    return fjoin.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)))


def until_signalled(folder: str) -> Any:
    """Rank 1 gets a SIGTERM in step 5."""
    step = make_step()
    batches = step.join([torch.ones(6)] * 1000)
    with fjoin.Checkpoints(folder, step, every_s=float("inf")) as runs:
        state = runs.restore(START)
        for batch in batches:
            if dist.get_rank() == 1 and state.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            state, metrics = step(state, batch)
            runs.save(state, metrics, data=batches)
    return state.step, batches.stopped, signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None)


def test_a_signal_on_one_rank_saves_and_stops_all(pool: Any, tmp_path: Path) -> None:
    (a, *rest), (b, *other) = pool.run(2, until_signalled, str(tmp_path))
    assert 5 < a == b <= 8 and rest == other == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{a:08d}"] and not verify(tmp_path)


def over_epochs(folder: str, signalled_in: int, background: bool) -> Any:
    """Rank 1 gets a SIGTERM in a step, or behind an epoch. The script is started three times in all."""
    step, codes = make_step(), []
    samples = [torch.full((6,), float(i)) for i in range(10)]
    for attempt in range(3):
        loop = step.join(DataLoader(samples, batch_sampler=fjoin.Shuffled(10, 2)))  # of each rank one sample in a step
        runs = fjoin.Checkpoints(folder, step, every=100, background=background)
        try:
            with runs:
                state = runs.restore(START, data=loop)
                for _ in range(loop.epoch, 4):
                    for batch in loop:
                        state, metrics = step(state, batch)
                        runs.save(state, metrics, data=loop)
                        if not attempt and dist.get_rank() == 1 and state.step == signalled_in:
                            signal.raise_signal(signal.SIGTERM)
                if attempt == 1:
                    runs.save(state, data=loop)
        except SystemExit as error:
            codes.append(error.code)
    return codes, state.step, state.params["w"].tolist()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("signalled_in", [7, 10])
def test_no_epoch_begins_after_a_signal(pool: Any, tmp_path: Path, signalled_in: int, background: bool) -> None:
    """A loop over epochs ends the program there, and loses no step of the epoch; the next start goes on."""
    found, other = pool.run(2, over_epochs, str(tmp_path), signalled_in, background)
    codes, steps, w = found
    assert codes == [143] and steps == 20 and found == other
    expected = START["w"] - 0.1 * 4 * sum(range(10)) / 2
    assert torch.allclose(torch.tensor(w), expected, atol=1e-5)


def by_the_clock(folder: str) -> Any:
    """The steps that two folders save."""
    step, saved = make_step(), ([], [])  # type: ignore[var-annotated]
    runs = [fjoin.Checkpoints(f"{folder}/{s}", step, every_s=s, keep_last=None) for s in (0.2, 0.5)]
    state = runs[0].restore(START)
    for batch in step.join([torch.ones(6)] * 40):
        state, metrics = step(state, batch)
        time.sleep(0.02)
        for run, steps in zip(runs, saved, strict=True):
            if run.save(state, metrics) is not None:
                steps.append(state.step)
    return saved


def test_saves_by_the_clock_are_of_the_same_steps(pool: Any, tmp_path: Path) -> None:
    a, b = pool.run(2, by_the_clock, str(tmp_path))
    assert a == b and 2 <= len(a[1]) <= len(a[0]) < 40


@pytest.mark.parametrize(
    ("options", "warns"),
    [({"every": 9}, True), ({"every_s": 300.0}, True), ({"every": 9, "every_s": float("inf")}, True),
     ({"every_s": float("inf")}, False), ({"every": 2}, False)],
)  # fmt: skip
def test_a_block_in_which_nothing_was_due_says_so(options: dict[str, Any], warns: bool, tmp_path: Path) -> None:
    """But not one that has restored, or that never called `save`."""
    for calls, restores in ((0, False), (3, False), (3, True)):
        folder = tmp_path / f"{calls} {restores}"
        if restores:
            fjoin.save(folder, one := make_step(), one.init(START))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with fjoin.Checkpoints(folder, step := make_step(), **options) as runs:
                state = runs.restore(START)
                for _ in range(calls):
                    state, metrics = step(state, torch.ones(6))
                    runs.save(state, metrics)
        texts = [str(one.message) for one in said]
        assert all(f"{key}={value}" in text for text in texts for key, value in options.items())
        assert len(texts) == (warns and calls > 0 and not restores)


def test_a_step_of_ones_choice(tmp_path: Path) -> None:
    """Newer steps are set aside once the run saves again; a look changes nothing."""

    def run(until: int, at: int | None = None, **options: Any) -> Any:
        step = make_step()
        runs = fjoin.Checkpoints(tmp_path, step, **options)
        state = runs.restore(START, step=at)
        names = [sorted(path.name[:22] for path in tmp_path.iterdir())]
        while state.step < until:
            state, metrics = step(state, torch.full((6,), 0.1))
            runs.save(state, metrics)
        return [*names, sorted(path.name[:22] for path in tmp_path.iterdir())]

    tx.simulate(lambda: run(6, every=2), {"data": 2})
    before, after = tx.simulate(lambda: run(3, at=2, every=1, keep_last=None), {"data": 2})[0]
    assert before == ["step-00000002", "step-00000004", "step-00000006"]
    assert after == ["step-00000002", "step-00000003", "step-00000004.rejected", "step-00000006.rejected"]
