"""The folder of a run: commits, faults of the file system, two runs, and what a crash leaves behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint._folder import Folder
from tests.checkpoint.saved_steps import RUN, fill, newest, save
from tests.helpers import raises_text

OTHER = "b" * 32


def names(folder: Folder) -> list[str]:
    return sorted(os.listdir(folder.path))


def test_steps_are_read_back_and_the_newest_is_found(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "runs" / "a")
    assert newest(folder) is None and folder.steps() == [] and not folder.path.exists()
    paths = [save(folder, step) for step in (5, 100, 123456789)]
    assert folder.steps() == [5, 100, 123456789] and names(folder) == [path.name for path in paths]
    path, manifest = folder.read(100)
    assert path == tmp_path / "runs" / "a" / "step-00000100" and manifest.step == 100
    found = newest(folder)
    assert found and (found.step, found.parent) == (123456789, manifest.id)
    raises_text(fjoin.CheckpointError, lambda: folder.read(6), "step-00000006", "[5, 100, 123456789]")


def put(kind: str) -> Callable[[Path], object]:
    """Something under the name of a step."""
    return {
        "folder": lambda path: path.mkdir(), "file": lambda path: path.write_bytes(b"mine"),
        "link": lambda path: path.symlink_to("nowhere"),
        "full folder": lambda path: (path.mkdir(), (path / "file").write_bytes(b"mine")),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_begin_refuses_what_exists_before_the_first_byte(kind: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    save(folder, 10)
    put(kind)(folder.step_path(20))
    before = names(folder)
    raises_text(fjoin.CheckpointError, lambda: folder.begin(20), "step-00000020", "never replaced")
    raises_text(fjoin.CheckpointError, lambda: folder.begin(10), "step-00000010", "exists")
    raises_text(fjoin.CheckpointError, lambda: folder.begin(9), "step 20", "step 9", "restore(step=...)")
    assert names(folder) == before and folder.begin(21) != folder.begin(21)


def of_another_run(folder: Folder, temporary: Path) -> None:
    save(folder, 10, OTHER)


# What happens between the begin and the commit of step 20, and words of the error.
MEANWHILE: dict[str, tuple[Callable[[Folder, Path], object], tuple[str, ...]]] = {
    "a folder": (lambda folder, path: put("folder")(folder.step_path(20)), ("step-00000020", "never replaced")),
    "a full folder": (lambda folder, path: put("full folder")(folder.step_path(20)), ("step-00000020", "never replaced")),
    "a file less": (lambda folder, path: (path / "rank-1.safetensors").unlink(), ("rank-1", "No such file")),
    "another file": (lambda folder, path: (path / "rank-1.safetensors").write_bytes(b"1"), ("rank-1", "1 bytes")),
    "a file more": (lambda folder, path: (path / "more").write_bytes(b""), ("more", "does not list")),
    "another run": (of_another_run, ("step 10", "another run")),
}  # fmt: skip


@pytest.mark.parametrize("what", MEANWHILE)
def test_commit_refuses_what_came_between(what: str, tmp_path: Path) -> None:
    folder, (change, words) = Folder(tmp_path), MEANWHILE[what]
    manifest = fill(temporary := folder.begin(20), 20)
    change(folder, temporary)
    before = sorted(path for path in tmp_path.rglob("*") if temporary not in path.parents)
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), *words)
    assert sorted(path for path in tmp_path.rglob("*") if temporary not in path.parents) == before


@pytest.mark.parametrize(("step", "parent"), [(30, "c" * 32), (9, "")])  # one that is not there, or no earlier step
def test_commit_refuses_another_parent(step: int, parent: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    save(folder, 10)
    manifest = fill(temporary := folder.begin(30), step, parent or folder.newest_id())
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), f"step {step}", "another run")
    assert folder.steps() == [10]


# A network file system may report an error of what it, or another run, has done.
RENAMES = [
    (errno.ENOENT, "done"), (errno.EIO, "done"), (errno.EEXIST, "done"), (errno.EIO, ""),
    (errno.ENOTEMPTY, "by another"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "what"), RENAMES)
def test_a_rename_that_was_done_counts_whatever_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, what: str
) -> None:
    save(elsewhere := Folder(tmp_path / "b"), 1, OTHER)
    folder, rename = Folder(tmp_path / "a"), os.rename
    manifest = fill(temporary := folder.begin(1), 1)

    def fail(source: str, target: str) -> None:
        if what == "done":
            rename(source, target)
        if what == "by another":
            shutil.copytree(elsewhere.step_path(1), target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "rename", fail)
    if what == "done":
        assert folder.commit(temporary, manifest) == folder.step_path(1) and folder.read(1)[1] == manifest
        return
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), "is not saved", os.strerror(code))
    assert folder.steps() == [1] * bool(what)


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
def test_a_full_disk_leaves_the_older_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The call fails at its first, second, ... time, until a save succeeds."""
    folder = Folder(tmp_path)
    save(folder, 1)
    real, refused = getattr(os, call), 0
    while True:
        left = [refused]

        def fail(*args: object, left: list[int] = left, **words: object) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **words)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            try:
                save(folder, 2)
                break
            except fjoin.CheckpointError as error:
                reason = str(error)
        assert "No space left" in reason and "free some space" in reason
        refused += 1
        found = newest(folder)
        assert found and (found.step == 1 or "may be lost" in reason), refused
        if found.step == 2:
            break
    assert refused >= {"write": 4, "fsync": 6, "mkdir": 1}[call]


def damaged(path: Path, before: Path, chance: random.Random) -> str:
    """Change bits or a run of a file, cut its end off, delete it, put another or a link in its place, or one beside it."""
    what = chance.choice(
        ["flip", "flip", "run", "cut", "delete", "another", "that of the step before", "a link", "more"]
    )
    data, others = bytearray(path.read_bytes()), sorted(set(path.parent.iterdir()) - {path})
    path.unlink()
    if what == "flip":
        for _ in range(chance.choice([1, 1, 30])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif what == "run":
        at = chance.randrange(len(data))
        data[at : at + 64] = bytes(255 - one for one in data[at : at + 64])
    elif what == "cut":
        del data[chance.randrange(len(data)) :]
    elif what == "more":
        path.with_suffix(".more").write_bytes(chance.choice(others).read_bytes())
    elif what == "a link":
        path.symlink_to(before / path.name)
    elif what != "delete":
        data[:] = (chance.choice(others) if what == "another" else before / path.name).read_bytes()
    if what not in ("delete", "a link"):
        path.write_bytes(data)
    return f"{what} {path.name}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_25_damaged_checkpoints_are_refused_and_the_one_before_is_restored(seed: int, tmp_path: Path) -> None:
    chance, start = random.Random(seed), {"w": torch.zeros(700), "b": torch.zeros(3)}
    pipeline = tx.zero(tx.mean("data"), tx.adam(0.1), "data")

    def run(rank: int, folder: Path, saves: bool, step: int | None = None) -> Any:
        one = fjoin.train_step(lambda p, x: sum((v - x).square().sum() for v in p.values()), pipeline)
        runs = fjoin.Checkpoints(folder, one, every=1)
        state = runs.restore(start, step=step)
        for _ in range(2 * saves):
            state, metrics = one(state, torch.tensor(rank + 1.0))
            runs.save(state, metrics)
        return state.step, {path: p.clone() for path, p in state.params.items()}

    def restored(folder: Path, step: int | None = None) -> Any:
        return tx.simulate(lambda rank: run(rank, folder, False, step), {"data": 2}, [0, 1])

    tx.simulate(lambda rank: run(rank, tmp_path / "sound", True), {"data": 2}, [0, 1])
    want = restored(tmp_path / "sound", 1)
    for number in range(25):
        shutil.copytree(tmp_path / "sound", folder := tmp_path / str(number))
        file = chance.choice(sorted((folder / "step-00000002").iterdir()))
        what = damaged(file, folder / "step-00000001", chance)
        raises_text(fjoin.CheckpointError, lambda folder=folder: restored(folder, 2))  # type: ignore[misc]
        for (step, params), (_, expected) in zip(restored(folder), want, strict=True):
            assert step == 1 and all(torch.equal(params[path], expected[path]) for path in start), what


def test_steps_of_which_none_can_be_read_are_an_error(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    for step in (1, 2):
        save(folder, step)
        (folder.step_path(step) / "rank-0.safetensors").write_bytes(b"")
    folder.step_path(3).mkdir()  # such as a copy that was cut short
    save(Folder(tmp_path / "elsewhere"), 4)
    folder.step_path(4).symlink_to(Folder(tmp_path / "elsewhere").step_path(4))
    text = raises_text(fjoin.CheckpointError, lambda: newest(folder), "none can be read", "start anew", "is a link")
    assert all(str(folder.step_path(step)) in text for step in (1, 2, 3, 4))


def test_a_step_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    save(folder, 1)
    folder.step_path(1).rename(folder.step_path(2))
    raises_text(fjoin.CheckpointError, lambda: folder.read(2), "holds step 1", "step-00000001")


def test_a_step_that_is_refused_sets_none_aside(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    raises_text(fjoin.CheckpointError, lambda: folder.begin(2, 2), "step-00000002 exists")
    assert folder.steps() == [1, 2, 3]
    folder.begin(3, 2)
    assert folder.steps() == [1, 2]


def test_old_steps_of_ones_own_run_are_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2, 3, 4, 5, 6):
        save(folder, step, OTHER if step == 2 else RUN)
    assert folder.retain(2, 3, RUN) == [1, 4] and folder.steps() == [2, 3, 5, 6]
    (folder.step_path(3) / "COMMIT").write_bytes(b"?")
    assert folder.retain(1, None, RUN) == [5] and folder.steps() == [2, 3, 6]
    assert all(name.startswith("step-") for name in names(folder))


def test_a_run_that_restores_goes_on_and_another_run_leaves_its_steps(tmp_path: Path) -> None:
    def steps(restores: bool, *steps: int) -> list[int]:
        runs = fjoin.Checkpoints(tmp_path, {"model": torch.nn.Linear(1, 1)}, keep_last=2)
        if restores:
            runs.restore()
        for step in steps:
            runs.save(step)
        return Folder(tmp_path).steps()

    assert steps(False, 1, 2, 3) == [2, 3]
    assert steps(True, 4) == [3, 4]
    assert steps(False, 5, 6, 7) == [3, 4, 6, 7]
