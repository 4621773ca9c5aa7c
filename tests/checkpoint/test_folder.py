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


def test_begin_refuses_what_exists_before_the_first_byte(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    save(folder, 10)
    for kind in (
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.symlink_to("nowhere"),
    ):
        kind(folder.step_path(20))
        raises_text(fjoin.CheckpointError, lambda: folder.begin(20), "step-00000020", "never replaced")
        folder.step_path(20).rmdir() if folder.step_path(20).is_dir() else folder.step_path(20).unlink()
    raises_text(fjoin.CheckpointError, lambda: folder.begin(10), "step-00000010", "exists")
    raises_text(fjoin.CheckpointError, lambda: folder.begin(9), "step 10", "step 9", "restore(step=...)")
    assert names(folder) == ["step-00000010"]
    assert folder.begin(11) != folder.begin(11)


@pytest.mark.parametrize("content", [None, b"mine"])
def test_commit_never_replaces_a_folder_that_came_meanwhile(tmp_path: Path, content: bytes | None) -> None:
    folder = Folder(tmp_path)
    manifest = fill(temporary := folder.begin(1), 1)
    folder.step_path(1).mkdir()
    if content:
        (folder.step_path(1) / "file").write_bytes(content)
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), "step-00000001", "never replaced")
    assert [path.read_bytes() for path in folder.step_path(1).iterdir()] == ([content] if content else [])


def test_commit_refuses_files_that_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    def after(change: Callable[[Path], object], *parts: str) -> None:
        manifest = fill(temporary := folder.begin(1), 1)
        change(temporary)
        raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), *parts)
        folder.discard(temporary)

    after(lambda path: (path / "rank-1.safetensors").unlink(), "rank-1", "No such file")
    after(lambda path: (path / "rank-1.safetensors").write_bytes(b"1"), "rank-1", "1 bytes")
    after(lambda path: (path / "more").write_bytes(b""), "more", "does not list")
    assert names(folder) == []


def test_two_runs_in_one_folder_are_noticed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first, second = folder.begin(10), folder.begin(20)
    mine, other = fill(first, 10), fill(second, 20, run=OTHER)
    folder.commit(first, mine)
    raises_text(fjoin.CheckpointError, lambda: folder.commit(second, other), "step 10", mine.id, "another run")
    missing = fill(temporary := folder.begin(30), 30, "c" * 32)
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, missing), "c" * 32, "another run")
    older = fill(temporary := folder.begin(30), 9, mine.id)  # the parent is not an earlier step
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, older), "step 9", "another run")
    assert folder.steps() == [10]


@pytest.mark.parametrize(
    ("code", "done"), [(errno.ENOENT, True), (errno.EIO, True), (errno.EEXIST, True), (errno.EIO, False)]
)
def test_a_rename_that_was_done_counts_whatever_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, done: bool
) -> None:
    folder, rename = Folder(tmp_path), os.rename
    manifest = fill(temporary := folder.begin(1), 1)

    def fail(source: str, target: str) -> None:
        if done:
            rename(source, target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "rename", fail)
    if done:
        assert folder.commit(temporary, manifest) == folder.step_path(1) and folder.read(1)[1] == manifest
        return
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), "is not saved", "Input/output")
    assert folder.steps() == [] and newest(folder) is None


def test_a_rename_that_another_run_did_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(elsewhere := Folder(tmp_path / "b"), 1, OTHER)
    folder = Folder(tmp_path / "a")
    manifest = fill(temporary := folder.begin(1), 1)

    def too_late(source: str, target: str) -> None:
        shutil.copytree(elsewhere.step_path(1), target)
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "rename", too_late)
    raises_text(fjoin.CheckpointError, lambda: folder.commit(temporary, manifest), "the step is not saved")


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    raises_text(fjoin.CheckpointError, lambda: Folder(tmp_path).begin(1), str(tmp_path), "give this user the right")


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


@pytest.mark.parametrize("seed", range(4))
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


def test_newer_steps_are_put_aside(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    moved = folder.quarantine(1, RUN)
    assert [path.name for path in moved] == [f"step-0000000{step}.rejected-{RUN}" for step in (2, 3)]
    assert folder.steps() == [1] and folder.quarantine(1, RUN) == []
    save(folder, 2)
    assert folder.steps() == [1, 2] and len(folder.quarantine(1, RUN)) == 1 and len(names(folder)) == 4


def test_old_steps_of_ones_own_run_are_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2, 3, 4, 5, 6):
        save(folder, step, OTHER if step == 2 else RUN)
    assert folder.retain(2, 3, RUN) == [1, 4] and folder.steps() == [2, 3, 5, 6]
    (folder.step_path(3) / "COMMIT").write_bytes(b"?")
    assert folder.retain(1, None, RUN) == [5] and folder.steps() == [2, 3, 6]
    assert all(name.startswith("step-") for name in names(folder))
