"""The two files that make a folder a step of a run: `manifest.json`, and `COMMIT`, which covers it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from .._errors import CheckpointError
from ._files import open_file, read_small, typed_errors, write_small
from ._json import Refused, parse, record, text
from ._manifest import Manifest

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
