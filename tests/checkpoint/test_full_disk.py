"""A disk that is really full: an error, nothing is lost, and the next save works once there is space."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import verify
from tests.helpers import raises_text, same_bits

PAGE, PAGES, NAMES = 4096, 512, 64  # bytes; of the disk
START = {f"w{i}": torch.linspace(-1, 1, 10_000) for i in range(4)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory."""
    options = f"size={PAGE * PAGES},nr_inodes={NAMES}"
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no program `mount` here")
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def free(disk: Path) -> tuple[int, int]:
    """Pages, and names of files."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize // PAGE, found.f_favail


# A step takes about 80 pages, and 4 names.
LACKING = [(PAGES, "pages"), (40, "pages"), (2, "pages"), (1, "pages"), (NAMES, "names"), (2, "names"), (1, "names")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("missing", "what"), LACKING)
def test_a_save_that_does_not_fit(missing: int, what: str, background: bool, disk: Path) -> None:
    def made() -> fjoin.TrainStep:
        pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))
        return fjoin.train_step(lambda p, x: sum((v * x).sum() for v in p.values()), pipeline)

    step, before = made(), free(disk)
    runs = fjoin.Checkpoints(disk / "run", step, background=background)
    state = runs.restore(START)

    def save() -> None:
        runs.save(state)
        runs.wait()

    save()
    first = state.clone().params
    pages, names = (a - b for a, b in zip(before, free(disk), strict=True))  # of a step, and the name of the run
    (disk / "filler").mkdir()
    if what == "pages":
        left = max(pages - missing, 0)
        (disk / "filler" / "pages").write_bytes(bytes((free(disk)[0] - left) * PAGE))
    else:
        for i in range(free(disk)[1] - max(names - 1 - missing, 0)):
            (disk / "filler" / str(i)).touch()
    state, _ = step(state, torch.tensor(2.0))
    raises_text(fjoin.CheckpointError, save, "No space left on device", str(disk / "run"))
    assert os.listdir(disk / "run") == ["step-00000000"] and not verify(disk / "run")
    assert same_bits(fjoin.load(disk / "run", made(), START).params, first)
    shutil.rmtree(disk / "filler")
    save()
    assert sorted(os.listdir(disk / "run")) == ["step-00000000", "step-00000001"] and not verify(disk / "run")
    assert same_bits(fjoin.load(disk / "run", made(), START).params, state.clone().params)
