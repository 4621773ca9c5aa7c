"""A power failure at any moment of a save leaves the old state or the new one, whole.

Each prefix of its calls is replayed on a model of a disk, on which only what was synced is sure; names may come earlier.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fjoin.checkpoint._folder import Folder
from tests.checkpoint.saved_steps import newest, save

Call = tuple[str, tuple[Any, ...]]


class File:
    def __init__(self, data: bytes = b"") -> None:
        self.data = self.synced = data


class Dir:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.synced: dict[str, Any] = {}


def load(path: Path) -> Any:
    """The model of what is on the disk."""
    if path.is_file():
        return File(path.read_bytes())
    made = Dir()
    made.names = {one.name: load(one) for one in path.iterdir()}
    made.synced = dict(made.names)
    return made


def replay(root: Dir, calls: list[Call], top: Path) -> None:
    def at(path: Any) -> Any:
        found: Any = root
        for name in Path(path).relative_to(top).parts:
            found = found.names[name]
        return found

    for call, args in calls:
        path = Path(args[0])
        if call == "mkdir":
            at(path.parent).names[path.name] = Dir()
        elif call == "create":
            at(path.parent).names[path.name] = File()
        elif call == "write":
            at(path).data += args[1]
        elif call == "fsync":
            found = at(path)
            found.synced = found.data if isinstance(found, File) else dict(found.names)
        elif call == "rename":
            at(Path(args[1]).parent).names[Path(args[1]).name] = at(path.parent).names.pop(path.name)


def store(model: Any, path: Path, early_names: bool) -> None:
    """Write what a power failure leaves: what was synced, and with `early_names` all names."""
    if isinstance(model, File):
        path.write_bytes(model.synced)
        return
    path.mkdir()
    for name, inside in (model.names if early_names else model.synced).items():
        store(inside, path / name, early_names)


def record(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[Call]:
    """The calls that change the disk while an action runs."""
    calls: list[Call] = []

    def recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            result = real(*args, **words)
            if name in ("write", "fsync"):
                path = os.readlink(f"/proc/self/fd/{args[0]}")
                calls.append((name, (path, bytes(args[1][:result])) if name == "write" else (path,)))
            elif name != "open" or args[1] & os.O_CREAT:
                calls.append(("create" if name == "open" else name, tuple(map(str, args))))
            return result

        return call

    with monkeypatch.context() as patched:
        for name in ("open", "write", "fsync", "mkdir", "rename"):
            patched.setattr(os, name, recording(name, getattr(os, name)))
        action()
    return calls


def outcomes(before: Path, calls: list[Call], top: Path, work: Path) -> list[int | str | None]:
    """The newest step after each prefix, in the two cases, or the error."""
    found: list[int | str | None] = []
    for count in range(len(calls) + 1):
        for early_names in (False, True):
            shutil.rmtree(work, ignore_errors=True)
            model = load(before)
            replay(model, calls[:count], top)
            store(model, work, early_names)
            try:
                one = newest(folder := Folder(work / "runs" / "a"))
                found.append(one and (one.step if one.step == folder.newest() else f"refused {folder.newest()}"))
            except Exception as error:
                found.append(str(error))
    return found


def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int | None) -> tuple[Path, list[Call], Path]:
    top = tmp_path / "disk"
    top.mkdir()
    folder = Folder(top / "runs" / "a")
    if old is not None:
        save(folder, old)
    shutil.copytree(top, tmp_path / "before")
    return tmp_path / "before", record(monkeypatch, lambda: save(folder, 9, seed=1)), top


@pytest.mark.parametrize("old", [None, 8])
def test_every_prefix_of_a_save_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int | None
) -> None:
    before, calls, top = saved(tmp_path, monkeypatch, old)
    assert [call for call, _ in calls].count("rename") == 1 and len(calls) > 15
    found = outcomes(before, calls, top, tmp_path / "after")
    assert found[:-3] == [old] * (len(found) - 3)
    assert found[-3:] == [9, 9, 9], "after the rename it may be the new one; when the commit has returned it is"


def synced_things(calls: list[Call]) -> list[int]:
    return [number for number, (call, _) in enumerate(calls) if call == "fsync"]


def test_the_replay_notices_each_fsync_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls, top = saved(tmp_path, monkeypatch, None)
    for number in synced_things(calls):
        found = outcomes(before, calls[:number] + calls[number + 1 :], top, tmp_path / "after")
        assert set(found) != {None, 9} or found[-2:] != [9, 9], calls[number]
