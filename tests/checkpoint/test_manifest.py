"""The manifest: it is read as it was written, and what a read could take beyond its files, ranks and leaves is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin.checkpoint._manifest import OWN_FILES, Manifest, read_step, write_commit
from tests.checkpoint.saved_steps import fill, new_manifest
from tests.helpers import raises_text


def full(tmp_path: Path) -> Manifest:
    manifest = fill(tmp_path, 7, "b" * 32)
    manifest.spec = {"text": "fuse(mean('data'))", "fingerprint": [1, 2.5, None, True]}
    manifest.settings, manifest.library = {"bucket_bytes": 1 << 20}, {"torch": "2.13"}
    manifest.numbers |= {"each": [1, 2.5], "one": [True]}
    manifest.ranks, manifest.notes = [{"batches": 3, "seed": 2**127}, {"batches": 4}], ["ü"]
    manifest.extra = {"a": [1, {"b": '\n"'}]}
    return manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = full(tmp_path)
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest and again.to_bytes() == manifest.to_bytes()
    assert json.loads(manifest.to_bytes())["leaves"]["m"]["parts"][1] == {
        "file": 1,
        "name": "m@7",
        "rank": 1,
        "start": 7,
    }
    assert Manifest.from_bytes(new_manifest(0).to_bytes()).files == []


def put(*path: Any) -> Callable[[Any], None]:
    """Sets the value at a path, of which it is the last item."""

    def change(value: Any) -> None:
        *way, key, new = path
        for one in way:
            value = value[one]
        value[key] = new

    return change


PART = ("leaves", "m", "parts", 0)
CASES: list[tuple[Callable[[Any], Any], str]] = [
    (put("version", 2), "version is 2: this fjoin reads version 1; read it with"),
    (put("version", True), "version is True"),
    (lambda value: value.pop("version"), "version is None"),
    (put("more", 1), "more"),
    (put("run", "../x"), "run is '../x'"),
    (put("step", True), "step is True"),
    (put("axes", "data", 0), "0 ranks"),
    (put("axes", "data", 3), "3 ranks"),
    (put("settings", []), "settings is []"),
    (put("numbers", "calls", 3), "int"),
    (put("numbers", "calls", [1, 2, 3]), "2 ranks"),
    (put("ranks", [{}]), "2 ranks"),
    (put("ranks", [1, 2]), "2 ranks"),
    (put("leaves", "m", "shape", [-3, -4]), "[-3, -4]"),
    (put("leaves", "m", "shape", [3, True]), "[3, True]"),
    (put("leaves", "m", "shape", [0, 2**62]), "a shape is"),
    (put("leaves", "m", "dtype", "float31"), "float31"),
    (put("leaves", "m", "dtype", {}), "unhashable"),
    (put("leaves", "m", "placement", None), "leaves['m']"),
    (put("leaves", "m", "parts", []), "leaves['m']"),
    (put(*PART, "file", 2), "leaves['m'] has Part(file=2"),
    (put(*PART, "file", None), "leaves['m'] has Part(file=None"),
    (put(*PART, "file", -1), "leaves['m'] has Part(file=-1"),
    (put(*PART, "rank", 2), "of 2 files, 2 ranks, 12 elements"),
    (put(*PART, "rank", -1), "rank=-1"),
    (put(*PART, "start", 13), "start=13"),
    (put(*PART, "start", -1), "start=-1"),
    (put("files", 0, "name", "../a"), "'../a'"),
    (put("files", 0, "name", "a/b"), "'a/b'"),
    (put("files", 0, "name", "a..b"), "'a..b'"),
    (put("files", 0, "name", "."), "'.'"),
    (put("files", 0, "name", "a\n"), "'a\\n'"),
    (put("files", 0, "name", "COMMIT"), "'COMMIT'"),
    (put("files", 0, "name", "manifest.json"), "'manifest.json'"),
    (put("files", 0, "size", 2**40), "1 blocks"),
    (put("files", 0, "size", "1"), "str"),
]


@pytest.mark.parametrize(("change", "part"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_fields_that_are_not_as_expected_are_refused(tmp_path: Path, change: Callable[[Any], Any], part: str) -> None:
    value = json.loads(full(tmp_path).to_bytes())
    changed = copy.deepcopy(value)
    change(changed)
    assert Manifest.from_bytes(json.dumps(value).encode())
    raises_text(
        fjoin.CheckpointError, lambda: Manifest.from_bytes(json.dumps(changed).encode(), "runs/m"), "runs/m", part
    )


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 200_000, b'{"version": 1}'], ids=range(6))
def test_other_texts_are_refused(data: bytes) -> None:
    raises_text(fjoin.CheckpointError, lambda: Manifest.from_bytes(data), "manifest.json", "use another step")


@pytest.mark.parametrize("odd", [{}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$tensor": []}, {"$float": "x"}], ids=str)
def test_an_odd_state_dict_under_right_checksums_is_one_error(tmp_path: Path, odd: Any) -> None:
    objects = {"it": torch.nn.Linear(1, 1)}
    path = fjoin.save(tmp_path, objects, 1)
    manifest = read_step(path)
    manifest.ranks[0]["objects"]["it"] = odd
    for name in OWN_FILES:
        (path / name).unlink()
    write_commit(path, manifest)
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, objects), "manifest.json", "use another step")
