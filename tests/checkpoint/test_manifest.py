"""The manifest: it is read as it was written, and every field of another kind is refused with its place."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fjoin
from fjoin.checkpoint._files import FileEntry
from fjoin.checkpoint._manifest import Manifest
from fjoin.checkpoint._safetensors import Leaf, Part
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


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


NAN, PART = float("nan"), ("leaves", "m", "parts", 0)
CASES: list[tuple[Callable[[Any], Any], str]] = [
    (put("version", 2), "version is 2: this fjoin reads version 1; read it with"),
    (put("version", True), "version is True"),
    (put("version", "1"), "version is '1'"),
    (lambda value: value.pop("version"), "version is None"),
    (lambda value: value.pop("notes"), "the set of keys of the manifest"),
    (put("more", 1), "the set of keys of the manifest"),
    (put("run", "A" * 32), "run is"),
    (put("run", ""), "run is ''"),
    (put("id", 3), "id is 3"),
    (put("parent", "x"), "parent is 'x'"),
    (put("step", -1), "step is -1"),
    (put("step", True), "step is True"),
    (put("step", 1.0), "step is 1.0"),
    (put("step", 2**63), "step is"),
    (put("axes", "data", 0), "axes['data'] is 0"),
    (put("axes", "data", True), "axes['data'] is True"),
    (put("axes", []), "axes is []"),
    (put("axes", "data", 3), "the number of ranks"),
    (put("spec", deep(70)), "nested"),
    (put("settings", []), "settings is []"),
    (put("library", "torch", 2), "library['torch'] is 2"),
    (put("numbers", "calls", 3), "numbers['calls'] is 3"),
    (put("numbers", "calls", [[]]), "numbers['calls'][0]"),
    (put("numbers", "calls", [1, 2, 3]), "the length of numbers['calls'] is 3"),
    (put("ranks", [{}]), "the length of ranks is 1"),
    (put("ranks", [1, 2]), "ranks[0] is 1"),
    (put("notes", [1]), "notes[0] is 1"),
    (put("leaves", "m", "shape", [-3, -4]), "a dim of leaves['m'] is -3"),
    (put("leaves", "m", "shape", [3, True]), "a dim of leaves['m'] is True"),
    (put("leaves", "m", "dtype", "float31"), "the dtype of leaves['m'] is 'float31'"),
    (put("leaves", "m", "placement", None), "the placement of leaves['m']"),
    (put("leaves", "m", "parts", []), "the parts of leaves['m'] is []"),
    (put("leaves", "m", {}), "the set of keys of leaves['m']"),
    (put(*PART, "file", 2), "file of a part of leaves['m'] is 2"),
    (put(*PART, "file", None), "file of a part of leaves['m'] is None"),
    (put(*PART, "file", -1), "file of a part of leaves['m'] is -1"),
    (put(*PART, "rank", 2), "rank of a part of leaves['m'] is 2"),
    (put(*PART, "rank", False), "rank of a part of leaves['m'] is False"),
    (put(*PART, "start", 13), "start of a part of leaves['m'] is 13"),
    (put(*PART, "start", None), "one whole part, or one of each rank, or pieces"),
    (put(*PART, "name", 1), "name of a part of leaves['m'] is 1"),
    (put(*PART, "name", "steps"), "another one than of leaves['steps']"),
    (put("leaves", "error", "parts", 1, "rank", 0), "no two parts of one rank"),
    (put("leaves", "error", "parts", 1, "rank", None), "one whole part"),
    (put("files", 0, "name", "../a"), "name of files[0]"),
    (put("files", 0, "name", "a/b"), "name of files[0]"),
    (put("files", 0, "name", "a..b"), "name of files[0]"),
    (put("files", 0, "name", "."), "name of files[0]"),
    (put("files", 0, "name", "a\n"), "name of files[0]"),
    (put("files", 0, "name", "COMMIT"), "name of files[0]"),
    (put("files", 0, "name", "rank-1.safetensors"), "the names of files"),
    (put("files", 0, "size", -1), "size of files[0] is -1"),
    (put("files", 0, "size", 2**40), "the number of blocks of files[0]"),
    (put("files", 0, "blocks", [2**32]), "a block of files[0] is"),
    (put("files", 0, "blocks", ["1"]), "a block of files[0] is '1'"),
    (put("files", {}), "files is {}"),
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


TEXTS = {
    b"": "JSON", b"[]": "the manifest is []", b"{": "JSON", b"\xff": "JSON", b'{"version":1,"version":1}': "twice",
    b"[" * 200_000: "nested", b'{"version": NaN}': "NaN", b'{"version": 1e999}': "version is inf",
}  # fmt: skip


@pytest.mark.parametrize("data", TEXTS, ids=range(len(TEXTS)))
def test_other_texts_are_refused(data: bytes) -> None:
    raises_text(fjoin.CheckpointError, lambda: Manifest.from_bytes(data), "manifest.json", TEXTS[data])


@pytest.mark.parametrize("extra", [NAN, float("inf"), (1, 2), {1: 2}, [object()], [[{"a": {2}}]], b"x", deep(2000)])
def test_values_that_would_not_be_read_back_are_not_written(extra: Any) -> None:
    raises_text(TypeError, new_manifest(0, extra=extra).to_bytes, "extra")


def test_an_infinity_in_a_number_is_refused() -> None:
    data = new_manifest(0, extra=[5.5]).to_bytes().replace(b"5.5", b"1e999")
    raises_text(fjoin.CheckpointError, lambda: Manifest.from_bytes(data), "extra[0] is inf")


def test_no_call_of_json_writes_many_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """json.dumps does not let other threads run."""
    leaves = {f"layer.{k}": Leaf([4, 3], "float32", {}, [Part(0, f"layer.{k}")]) for k in range(2000)}
    manifest = new_manifest(0, leaves=leaves, files=[FileEntry("a", 0, [])])
    lengths: list[int] = []
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda value: lengths.append(len(dumps(value))) or dumps(value))
    started = time.process_time()
    data = manifest.to_bytes()
    assert time.process_time() - started < 5
    assert len(data) > 100_000 and max(lengths) < 500 and Manifest.from_bytes(data) == manifest
