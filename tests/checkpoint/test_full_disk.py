"""A disk that is really full: an error on all ranks, nothing is lost, and the next save works once there is space."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import verify

PAGE, PAGES, NAMES = 4096, 512, 64  # bytes; of the disk
START = {f"w{i}": torch.linspace(-1, 1, 10_000) for i in range(4)}
PIPELINE = tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory."""
    options = f"size={PAGE * PAGES},nr_inodes={NAMES}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no program `mount` here")
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def loss_fn(params: Any, x: Tensor) -> Any:
    return sum((p * x).sum() for p in params.values())


def free(disk: Path) -> tuple[int, int]:
    """Pages, and names of files."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize // PAGE, found.f_favail


def fill(disk: Path, pages: int | None = None, names: int | None = None) -> None:
    """Leave so many pages, or names; None: all."""
    (disk / "filler").mkdir()
    if pages is not None:
        (disk / "filler" / "pages").write_bytes(bytes((free(disk)[0] - pages) * PAGE))
        assert free(disk)[0] == pages
    if names is not None:
        for i in range(free(disk)[1] - names):
            (disk / "filler" / str(i)).touch()
        assert free(disk)[1] == names


def empty(disk: Path) -> None:
    for path in (disk / "filler").iterdir():
        path.unlink()
    (disk / "filler").rmdir()


def save(runs: Any, state: Any) -> str:
    """Save, and wait; returns the text of the error."""
    try:
        runs.save(state)
        runs.wait()
    except fjoin.CheckpointError as error:
        return str(error)
    return ""


def restored(mesh: Any, folder: Path) -> Any:
    state = fjoin.load(folder, fjoin.train_step(loss_fn, PIPELINE, mesh=mesh), START)
    return state.step, state.params["w0"].tolist()


def run(path: str, background: bool, missing: int, what: str) -> dict[str, Any]:
    """Save step 1, and step 2 where there is too little space for it, and once there is enough."""
    warnings.simplefilter("ignore")
    mesh, disk = fjoin.mesh({"data": -1}), Path(path)
    step = fjoin.train_step(loss_fn, PIPELINE, mesh=mesh)
    runs = fjoin.Checkpoints(disk / "run", step, background=background)
    before = free(disk)
    state, _ = step(runs.restore(START), torch.tensor(1.0 + mesh.rank))
    assert not save(runs, state)
    first = state.clone().params["w0"].tolist()
    pages, names = (a - b for a, b in zip(before, free(disk), strict=True))  # of a step, and the name of the run
    mesh.exchange("all have looked", None, len)
    if mesh.rank == 0:
        left = {"pages": max(pages - missing, 0)} if what == "pages" else {"names": max(names - 1 - missing, 0)}
        fill(disk, **left)
    mesh.exchange("the disk is full", None, len)
    state, _ = step(state, torch.tensor(2.0 + mesh.rank))
    error = save(runs, state)
    mesh.exchange("the save has failed", None, len)
    held, earlier = sorted(os.listdir(disk / "run")), restored(mesh, disk / "run") == (1, first)
    mesh.exchange("all have looked again", None, len)
    if mesh.rank == 0:
        empty(disk)
    mesh.exchange("there is space", None, len)
    again = save(runs, state)
    last = restored(mesh, disk / "run") == (2, state.params["w0"].tolist())
    step.close()
    mesh.close()
    return {"error": error, "held": held, "earlier": earlier, "again": again, "last": last}


# A step takes about 80 pages, and 4 names on one rank.
@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("missing", "what"),
    [(PAGES, "pages"), (40, "pages"), (2, "pages"), (1, "pages"), (NAMES, "names"), (2, "names"), (1, "names")],
)
def test_a_save_that_does_not_fit(pool: Any, missing: int, what: str, background: bool, ranks: int, disk: Path) -> None:
    for found in pool.run(ranks, run, str(disk), background, missing, what):
        assert "No space left on device" in found["error"] and str(disk / "run") in found["error"]
        assert found["held"] == ["step-00000001"] and found["earlier"]
        assert not found["again"] and found["last"]
    assert sorted(os.listdir(disk)) == ["run"]
    assert sorted(os.listdir(disk / "run")) == ["step-00000001", "step-00000002"]
    assert not verify(disk / "run") and not verify(disk / "run" / "step-00000001")
