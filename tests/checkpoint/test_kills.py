"""Ranks that are killed while they save: the next run finds a whole checkpoint, and goes on from it to the bit."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save, verify
from tests.ranks import Ranks

START = {"w": torch.zeros(3000), "b": torch.zeros(5)}
STEPS = 400


def make_step(mesh: Any = None) -> Any:
    pipeline = tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.adamw(0.01))
    return fjoin.train_step(
        lambda p, x: ((p["w"] - x).square().sum() + (p["b"] + x[:5]).sum()) / 9, pipeline, mesh=mesh
    )


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(10 * step + rank))


def digest(state: Any) -> int:
    return zlib.crc32(b"".join(state.params[path].numpy().tobytes() for path in ("b", "w")))


def saving(rank: int, report: Any, folder: str, background: bool) -> None:
    """Restore, and report the step and its parameters; then train, saving each step, until the kill."""
    warnings.simplefilter("ignore")
    step = make_step(fjoin.mesh({"data": -1}))
    runs = fjoin.Checkpoints(folder, step, every=1, keep_last=2, background=background)
    state = runs.restore(START)
    report((state.step, digest(state)))
    while state.step < STEPS:
        state, metrics = step(state, batch_of(rank, state.step))
        runs.save(state, metrics)


@pytest.fixture(scope="module")
def uncut() -> Callable[[int], list[int]]:
    """Number of ranks -> the digest of the parameters after each step."""

    def run(rank: int) -> list[int]:
        step = make_step()
        state = step.init(START)
        found = [digest(state)]
        for i in range(STEPS):
            state, _ = step(state, batch_of(rank, i))
            found.append(digest(state))
        step.close()
        return found

    def on(ranks: int) -> list[int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return tx.simulate(run, {"data": ranks}, list(range(ranks)))[0]

    return functools.cache(on)


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    ("ranks", "kills"), [(2, 4), *(pytest.param(ranks, 25, marks=pytest.mark.long) for ranks in (1, 2, 3, 4))]
)
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(
    ranks: int, kills: int, background: bool, uncut: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """Often one rank is killed before the others, which may notice it."""
    draw, newest, steps, within = random.Random(10 * kills + ranks), 0, 0, 0
    for done in range(5 * kills):
        if done >= kills and steps:  # on a busy machine the first runs may have ended before they saved anything
            break
        with Ranks(ranks, saving, str(tmp_path), background) as run:
            found = [run.next(60)[2] for _ in range(ranks)]
            time.sleep(draw.uniform(0.1, 0.8 if kills < 20 else 2.0))
            if draw.random() < 0.5:
                run.processes[draw.randrange(ranks)].kill()
                time.sleep(draw.choice([0.0, 0.1, 0.5]))
        (step, params), *others = found
        assert all(other == (step, params) for other in others) and params == uncut(ranks)[step]
        assert step >= newest
        steps += step - newest
        newest = step
        within += sum(path.name.startswith(".tmp") for path in tmp_path.iterdir())
        for left in tmp_path.glob(".tmp-*"):
            shutil.rmtree(left)
        if newest > STEPS / 2:  # so that no run is at its end when it is killed
            assert not verify(tmp_path)
            shutil.rmtree(tmp_path)
            newest = 0
    assert steps > 0 and not (newest and verify(tmp_path))
    assert within > 0 or kills < 20  # saves that were under way


def writing(rank: int, report: Any, folder: str, what: str, odd: int, delay_s: float) -> None:
    """One rank's file takes a while, or it is killed meanwhile, or the loops of all ranks fail."""
    warnings.simplefilter("ignore")
    write = _save.write_file

    def slowly(*args: Any) -> Any:
        time.sleep(delay_s)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    if rank == odd:
        _save.write_file = slowly
    step = make_step(fjoin.mesh({"data": -1}, timeout_s=2))
    state, _ = step(step.init(START), batch_of(rank, 0))
    began, error = time.monotonic(), ""
    try:
        with fjoin.Checkpoints(folder, step, background=True) as runs:
            runs.save(state)
            if what == "failed":
                raise RuntimeError("of the loop")
    except Exception as raised:
        error = type(raised).__name__
    report((error, time.monotonic() - began))


@pytest.mark.parametrize(
    "killed", [pytest.param(0, marks=pytest.mark.long), 1]
)  # rank 0 is the host of the store, where no launcher is
def test_a_rank_that_is_killed_while_it_writes_is_noticed(killed: int, tmp_path: Path) -> None:
    with Ranks(2, writing, str(tmp_path), "killed", killed, 0.5) as run:
        _, _, (error, took_s) = run.next(60)
    assert error in ("PeerLost", "CollectiveTimeout") and took_s < 15
    assert killed == 0 or not list(tmp_path.iterdir())  # rank 0 has cleaned up
    assert not any(path.name.startswith("step") for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("what", "delay_s", "error"),
    [("slow", 3.0, ""), ("failed", 1.0, "RuntimeError")],  # longer than a message may take; of the loop
)
def test_a_save_that_is_being_written_is_not_lost(what: str, delay_s: float, error: str, tmp_path: Path) -> None:
    with Ranks(2, writing, str(tmp_path), what, 1, delay_s) as run:
        found = [run.next(60)[2] for _ in range(2)]
    assert [one for one, _ in found] == [error] * 2 and max(took_s for _, took_s in found) > 0.9 * delay_s
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"] and not verify(tmp_path)
