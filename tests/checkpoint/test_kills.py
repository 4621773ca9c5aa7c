"""Ranks that are killed while they save: the next run finds a whole checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import verify
from fjoin.checkpoint.saves._rank_file import RankFile
from tests.ranks import Ranks

START = {"w": torch.zeros(3000), "b": torch.zeros(5)}
STEPS = 400


def make_step(mesh: Any = None) -> Any:
    pipeline = tx.fuse(tx.error_feedback(tx.quantized_mean("data", tx.int8())), tx.adamw(0.01))
    return fjoin.train_step(
        lambda p, x: ((p["w"] - x).square().sum() + (p["b"] + x[:5]).sum()) / 9, pipeline, mesh=mesh
    )


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(2 * step + rank))


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
def uncut() -> list[int]:
    """The digest of the parameters after each step."""

    def run(rank: int) -> list[int]:
        step = make_step()
        state = step.init(START)
        found = [digest(state)]
        for i in range(STEPS):
            state, _ = step(state, batch_of(rank, i))
            found.append(digest(state))
        step.close()
        return found

    return tx.simulate(run, {"data": 2}, [0, 1])[0]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.long)])
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(
    kills: int, background: bool, uncut: list[int], tmp_path: Path
) -> None:
    draw, newest = random.Random(kills), 0
    for _ in range(kills):
        with Ranks(2, saving, str(tmp_path), background) as run:
            found = [run.next(60)[2] for _ in range(2)]
            time.sleep(draw.uniform(0.3, 2.0))
        (step, params), other = found
        assert other == (step, params) and params == uncut[step]
        assert step >= newest
        newest = step
    assert newest > 0 and not verify(tmp_path)


def writing_slowly(rank: int, report: Any, folder: str, what: str) -> None:
    """Rank 1 writes for longer than the mesh waits, or is killed while it writes."""
    warnings.simplefilter("ignore")
    write = RankFile.write

    def slowly(self: Any, to: Path) -> None:
        time.sleep(0.5 if what == "killed" else 3.0)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, to)

    if rank == 1:
        RankFile.write = slowly  # type: ignore[method-assign]
    step = make_step(fjoin.mesh({"data": -1}, timeout_s=2))
    runs = fjoin.Checkpoints(folder, step, background=True)
    state, _ = step(step.init(START), batch_of(rank, 0))
    began = time.monotonic()
    try:
        runs.save(state)
        runs.wait()
    except Exception as error:
        report((type(error).__name__, time.monotonic() - began))
    else:
        report(("saved", time.monotonic() - began))


def test_a_rank_that_is_killed_while_it_writes_is_noticed(tmp_path: Path) -> None:
    with Ranks(2, writing_slowly, str(tmp_path), "killed") as run:
        _, _, (what, took_s) = run.next(60)
    assert what in ("PeerLost", "CollectiveTimeout") and took_s < 15
    assert not list(tmp_path.iterdir())  # the rank that is left has cleaned up


def test_a_file_may_take_longer_than_a_message(tmp_path: Path) -> None:
    with Ranks(2, writing_slowly, str(tmp_path), "slow") as run:
        found = [run.next(60)[2] for _ in range(2)]
    assert all(what == "saved" and took_s > 2.5 for what, took_s in found) and not verify(tmp_path)
