"""The manifest of a checkpoint, and its commit."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import CheckpointError
from ._files import (
    BLOCK,
    FileEntry,
    Refused,
    array,
    mapping,
    open_file,
    parse,
    plain,
    read_small,
    record,
    refuse,
    text,
    typed_errors,
    whole,
    write_small,
)
from ._safetensors import Leaf, read_leaf

VERSION = 1
_FILE = re.compile(r"[A-Za-z0-9._-]+")
_UUID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Manifest:
    """What a checkpoint holds.

    Attributes:
        run, id, parent: uuids (hex) of the run, of this checkpoint, and of the newest earlier one in the folder, or "".
        step: The number of steps that were done.
        axes: The mesh: sizes by name.
        spec, settings: The pipeline, and options that resuming needs. Any JSON.
        library: Versions by name.
        leaves: By path.
        numbers: Host numbers by path: one of each rank, or a single one that all have.
        ranks: For each rank what only it has, such as its batches; or empty.
        notes: Messages to the reader, such as replicas that have drifted.
        extra: The user's own values. Any JSON.
        files: All files except manifest.json and COMMIT.
    """

    run: str
    id: str
    step: int
    parent: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    spec: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    library: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    numbers: dict[str, list[Any]] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: Any = None
    files: list[FileEntry] = field(default_factory=list)
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """The manifest as JSON. It is written leaf by leaf, so that other threads run in between.

        Raises:
            TypeError: A value would not be read back as it is.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["files"] = [*map(asdict, self.files)]
        try:
            _read(values | {"leaves": {}})  # leaves are made of checked values, and there are many
        except Refused as error:
            raise TypeError(f"a manifest cannot be written: {error}") from None
        values["leaves"] = {
            path: vars(leaf) | {"parts": [*map(vars, leaf.parts)]} for path, leaf in self.leaves.items()
        }
        return "".join(_pieces(values)).encode()

    @staticmethod
    def from_bytes(data: bytes, where: str = "manifest.json") -> Manifest:
        """The manifest that `to_bytes` has written. Every field is checked.

        Args:
            where: The file, for errors.

        Raises:
            CheckpointError: A field is missing, unknown or not as expected, or the version is unknown.
        """
        try:
            return _read(parse(data, "the text"))
        except Refused as error:
            raise CheckpointError(
                f"{where}: {error}; the file is damaged or of another program: use another step"
            ) from error


def _pieces(values: dict[str, Any]) -> Iterator[str]:
    comma = "{"
    for key, value in values.items():
        yield f"{comma}{json.dumps(key)}:"
        comma = ",\n"
        if isinstance(value, dict):
            yield "{"
            yield ",\n".join(f"{json.dumps(name)}:{json.dumps(one)}" for name, one in value.items())
            yield "}"
        elif isinstance(value, list):
            yield "["
            yield ",\n".join(json.dumps(one) for one in value)
            yield "]"
        else:
            yield json.dumps(value)
    yield "}\n"


def _read(value: Any) -> Manifest:
    version = mapping(value, "the manifest").get("version")
    if type(version) is not int or version != VERSION:
        what = f"this fjoin reads version {VERSION}; read it with the fjoin that wrote it, or a newer one"
        raise Refused(f"version is {version!r}: {what}")
    given = dict(record(value, "the manifest", {one.name for one in fields(Manifest)}))
    for name in ("run", "id", "parent"):
        if not _UUID.fullmatch(text(given[name], name)) and (name != "parent" or given[name]):
            refuse(name, given[name], "the 32 hexadecimal digits of a uuid")
    for name, check in _CHECKS.items():
        given[name] = check(given[name], name)
    ranks = math.prod(given["axes"].values())
    if len(given["ranks"]) not in (0, ranks):
        refuse("the length of ranks", len(given["ranks"]), f"0 or {ranks}, the number of ranks of axes")
    for path, numbers in given["numbers"].items():
        if len(numbers) not in (1, ranks):
            refuse(f"the length of numbers[{path!r}]", len(numbers), f"1 or {ranks}, the number of ranks of axes")
    _check_files(given["files"])
    _check_parts(given["leaves"], len(given["files"]), ranks)
    return Manifest(**given)


def _dict_of(check: Callable[[Any, str], Any]) -> Callable[[Any, str], dict[str, Any]]:
    return lambda value, where: {k: check(v, f"{where}[{k!r}]") for k, v in mapping(value, where).items()}


def _list_of(check: Callable[[Any, str], Any]) -> Callable[[Any, str], list[Any]]:
    return lambda value, where: [check(item, f"{where}[{index}]") for index, item in enumerate(array(value, where))]


def _object(value: Any, where: str) -> dict[str, Any]:
    return mapping(plain(value, where), where)


def _size(value: Any, where: str) -> int:
    return whole(value, where, 1)


def _number(value: Any, where: str) -> Any:
    return (
        refuse(where, value, "a number, string, bool or None") if type(value) in (list, dict) else plain(value, where)
    )


def _file(value: Any, where: str) -> FileEntry:
    given = record(value, where, {"name", "size", "blocks"})
    name, size = text(given["name"], f"name of {where}"), whole(given["size"], f"size of {where}")
    if not _FILE.fullmatch(name) or ".." in name or name in (".", "manifest.json", "COMMIT"):
        refuse(f"name of {where}", name, "letters, digits, and single . _ -, other than manifest.json and COMMIT")
    blocks = [whole(crc, f"a block of {where}", 0, 2**32 - 1) for crc in array(given["blocks"], f"blocks of {where}")]
    if len(blocks) != -(-size // BLOCK):
        refuse(f"the number of blocks of {where}", len(blocks), f"one for each {BLOCK} of {size} bytes")
    return FileEntry(name, size, blocks)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "step": whole,
    "axes": _dict_of(_size),
    "spec": plain,
    "settings": _object,
    "library": _dict_of(text),
    "leaves": _dict_of(read_leaf),
    "numbers": _dict_of(_list_of(_number)),
    "ranks": _list_of(_object),
    "notes": _list_of(text),
    "extra": plain,
    "files": _list_of(_file),
}


def _check_files(files: list[FileEntry]) -> None:
    if len(names := {file.name for file in files}) != len(files):
        refuse("the names of files", sorted(names), f"{len(files)} different ones")


def _check_parts(leaves: dict[str, Leaf], files: int, ranks: int) -> None:
    """Every part is in a file that is listed, is of a rank of the mesh, and is one leaf's only."""
    owners: dict[tuple[int, str], str] = {}
    for path, leaf in leaves.items():
        where = f"leaves[{path!r}]"
        for part in leaf.parts:
            whole(part.file, f"file of a part of {where}", 0, files - 1)
            whole(part.rank or 0, f"rank of a part of {where}", 0, ranks - 1)
            if (part.file, part.name) in owners:
                refuse(f"a part of {where}", part, f"another one than of leaves[{owners[part.file, part.name]!r}]")
            owners[part.file, part.name] = path


_LARGEST_MANIFEST = 4 << 30


class Commit(NamedTuple):
    """The content of a file COMMIT."""

    id: str
    run: str
    sha256: str  # of manifest.json


def read_step(path: Path) -> Manifest:
    """The manifest of a step's folder, which must be the one that was committed.

    Raises:
        CheckpointError: The folder was not committed, or its manifest or its COMMIT is damaged.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, expected a folder; put the folder itself there")
    commit = read_commit(path)
    data = read_small(path / "manifest.json", _LARGEST_MANIFEST)
    if hashlib.sha256(data).hexdigest() != commit.sha256:
        names = f"{path / 'manifest.json'} is not the one that COMMIT beside it covers"
        raise CheckpointError(f"{names}: one of the two is damaged; use another step")
    manifest = Manifest.from_bytes(data, str(path / "manifest.json"))
    if (manifest.id, manifest.run) != (commit.id, commit.run):
        raise CheckpointError(
            f"{path / 'COMMIT'} is {commit}, expected id {manifest.id} and run {manifest.run}; use another step"
        )
    return manifest


def read_commit(path: Path) -> Commit:
    """The content of the COMMIT in a step's folder. Every byte of it is checked, except against the manifest."""
    data = read_small(path / "COMMIT", 1000)
    try:
        given = record(parse(data, "it"), "it", set(Commit._fields))
        commit = Commit(**{key: text(value, key) for key, value in given.items()})
    except Refused as error:
        raise CheckpointError(f"{path / 'COMMIT'}: {error}; the file is damaged: use another step") from error
    if _commit_bytes(commit) != data:
        raise CheckpointError(f"{path / 'COMMIT'} is damaged: it is not written as fjoin does; use another step")
    return commit


def _commit_bytes(commit: Commit) -> bytes:
    return (json.dumps(commit._asdict()) + "\n").encode()


def write_commit(path: Path, manifest: Manifest) -> Commit:
    """Write a manifest, and then the COMMIT that covers it, durably."""
    data = manifest.to_bytes()
    commit = Commit(manifest.id, manifest.run, hashlib.sha256(data).hexdigest())
    write_small(path / "manifest.json", data)
    write_small(path / "COMMIT", _commit_bytes(commit))
    return commit


def check_files(tmp: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError unless a temporary folder holds the files of the manifest, and no others."""
    for entry in manifest.files:
        fd, size = open_file(tmp / entry.name)  # other hosts may have written it: opening asks the server anew
        os.close(fd)
        if size != entry.size:
            raise CheckpointError(f"{tmp / entry.name} has {size} bytes, expected {entry.size}; save the step again")
    with typed_errors(f"list {tmp}"):
        unexpected = sorted(set(os.listdir(tmp)) - {entry.name for entry in manifest.files})
    if unexpected:
        raise CheckpointError(f"{tmp} holds {unexpected}, which the manifest does not list; save the step again")
