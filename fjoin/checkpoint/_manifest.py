"""The manifest of a checkpoint, and its commit.

COMMIT covers the manifest, and the manifest every byte of the files, by checksums. So what is read here is what fjoin
has written, or was forged with right checksums: the checks keep such a file from reading elsewhere, and every other
oddity is one error.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import CheckpointError
from ._files import BLOCK, DTYPES, FileEntry, check_shape, decoding, open_file, read_small, typed_errors, write_blocks

VERSION = 1
OWN_FILES = frozenset({"manifest.json", "COMMIT"})  # beside those that a manifest lists
_FILE = re.compile(r"[A-Za-z0-9._-]+")
_UUID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class LeafPart:
    """A tensor of a file that is a leaf, or a piece of one.

    Attributes:
        file: The index in `Manifest.files`.
        name: The tensor's name in the file.
        rank: The rank whose value it is; None if all ranks have it.
        start: Of a piece, its first element in the flattened leaf; None for a whole leaf.
    """

    file: int
    name: str
    rank: int | None = None
    start: int | None = None


@dataclass(frozen=True)
class Leaf:
    """A tensor of the state.

    Attributes:
        shape: Of the whole leaf.
        dtype: The name in torch, such as "float32".
        placement: Where the ranks have it; any JSON.
        parts: Either one whole part, or one of each rank, or pieces.
    """

    shape: list[int]
    dtype: str
    placement: dict[str, Any]
    parts: list[LeafPart]


def leaf_of(shown: dict[str, Any]) -> Leaf:
    """A leaf, from its JSON."""
    return Leaf(**shown | {"parts": [LeafPart(**part) for part in shown["parts"]]})


@dataclass
class Manifest:
    """What a checkpoint holds.

    Attributes:
        run, id, parent: uuids (hex) of the run, of this checkpoint, and of the newest earlier one in the folder, or "".
        step: The number of steps that were done.
        axes: The mesh: sizes by name.
        spec: The pipeline. Any JSON.
        settings: Read, and written no more.
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
        """The manifest as JSON."""
        return json.dumps(self, default=vars).encode()

    @staticmethod
    def from_bytes(data: bytes, where: str = "manifest.json") -> Manifest:
        """The manifest that `to_bytes` has written.

        Args:
            where: The file, for errors.

        Raises:
            CheckpointError: A field is not as expected, or the version is unknown.
        """
        with decoding(where):
            given = json.loads(data)
            if (version := given.get("version")) != VERSION:
                what = f"this fjoin reads version {VERSION}; read it with the fjoin that wrote it, or a newer one"
                raise CheckpointError(f"{where}: version is {version!r}: {what}")
            given["files"] = [FileEntry(**one) for one in given["files"]]
            given["leaves"] = {path: leaf_of(leaf) for path, leaf in given["leaves"].items()}
            found = Manifest(**given)
            found._check()
        return found

    def _check(self) -> None:
        """Raise ValueError where a read would go beyond the folder, the files, the ranks, or a leaf.

        Every part is in a file that is listed, is of a rank of the mesh, and begins in its leaf.
        """
        sound = Manifest("", "", 0)
        for name, value in vars(self).items():
            kind = type(getattr(sound, name))
            if type(value) is not kind and name not in ("spec", "extra"):
                raise ValueError(f"{name} is {reprlib.repr(value)}, expected {kind.__name__}")
        if not (_UUID.fullmatch(self.run) and _UUID.fullmatch(self.id)):
            raise ValueError(f"run is {self.run!r} and id {self.id!r}, expected the 32 hexadecimal digits of a uuid")
        ranks, counts = math.prod(self.axes.values()), {len(held) for held in self.numbers.values()}
        own = all(type(one) is dict for one in self.ranks) and len(self.ranks) in (0, ranks)
        if not own or not counts <= {1, ranks}:
            raise ValueError(f"ranks or numbers are not of the {ranks} ranks of the axes {self.axes}")
        for one in self.files:
            if not _FILE.fullmatch(one.name) or ".." in one.name or one.name in (".", *OWN_FILES):
                what = "letters, digits, and single . _ -, other than manifest.json and COMMIT"
                raise ValueError(f"the name of a file is {one.name!r}, expected {what}")
            if len(one.blocks) != -(-one.size // BLOCK):
                raise ValueError(f"{one.name} has {len(one.blocks)} blocks, expected one for each {BLOCK} bytes")
        for path, leaf in self.leaves.items():
            where, numel = f"leaves[{path!r}]", math.prod(check_shape(leaf.shape))
            if leaf.dtype not in DTYPES or type(leaf.placement) is not dict or not leaf.parts:
                raise ValueError(f"{where} is {leaf}, expected a dtype of {sorted(DTYPES)}, a placement, and parts")
            for part in leaf.parts:
                inside = _within(part.file, len(self.files)) and (part.rank is None or _within(part.rank, ranks))
                begin = 0 if part.start is None else part.start
                if not inside or type(part.name) is not str or not _within(begin, numel + 1):
                    raise ValueError(f"{where} has {part}, of {len(self.files)} files, {ranks} ranks, {numel} elements")


def _within(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


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
    data = read_small(path / "manifest.json")
    if hashlib.sha256(data).hexdigest() != commit.sha256:
        names = f"{path / 'manifest.json'} is not the one that COMMIT beside it covers"
        raise CheckpointError(f"{names}: one of the two is damaged; use another step")
    manifest = Manifest.from_bytes(data, str(path / "manifest.json"))
    if (manifest.id, manifest.run) != (commit.id, commit.run):
        expected = f"expected id {manifest.id} and run {manifest.run}"
        raise CheckpointError(f"{path / 'COMMIT'} is {commit}, {expected}; use another step")
    return manifest


def read_commit(path: Path) -> Commit:
    """The content of the COMMIT in a step's folder. Every byte of it is checked, except against the manifest."""
    data = read_small(path / "COMMIT")
    with decoding(path / "COMMIT"):
        commit = Commit(**json.loads(data))
        if _commit_bytes(commit) != data:
            raise ValueError("it is not written as fjoin does")
    return commit


def _commit_bytes(commit: Commit) -> bytes:
    return (json.dumps(commit._asdict()) + "\n").encode()


def write_commit(path: Path, manifest: Manifest) -> Commit:
    """Write a manifest, and then the COMMIT that covers it, durably."""
    data = manifest.to_bytes()
    commit = Commit(manifest.id, manifest.run, hashlib.sha256(data).hexdigest())
    write_blocks(path / "manifest.json", [data])
    write_blocks(path / "COMMIT", [_commit_bytes(commit)])
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
