"""The checkpoint that a restore takes."""

from __future__ import annotations

import time
from pathlib import Path

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from .._commits import read_commit, read_step, verify_files
from .._folder import Folder
from .._manifest import Manifest
from .._newest import newest_verified
from ..values._together import on_each, on_first


def chosen(folder: Folder, mesh: Mesh, step: int | None) -> tuple[Path, Manifest] | None:
    """The newest step that verifies, or a given one; None where the folder holds none. All ranks take the same one.

    Each rank reads its share of the bytes.

    Raises:
        CheckpointError: on all ranks: there are steps, and none verifies; or the given one does not.
    """

    def checked(number: int) -> tuple[Path, Manifest]:
        path = folder.step_path(number)
        identifier = on_first(mesh, f"the choice of step {number}", lambda: _identifier(folder, number))

        def check() -> Manifest:
            manifest = _read_again(path, identifier)
            verify_files(path, manifest, (mesh.rank, mesh.size))
            return manifest

        return path, on_each(mesh, f"the check of step {number}", check)

    if step is not None:
        return checked(step)
    newest = newest_verified(folder, checked, on_first(mesh, "a look for checkpoints", folder.all_steps))
    return None if newest is None else (newest.path, newest.manifest)


def _identifier(folder: Folder, step: int) -> str:
    folder.refuse_missing(step)
    return read_commit(folder.step_path(step)).id


def _read_again(path: Path, identifier: str, wait_s: float = 60.0) -> Manifest:
    """The manifest of a step, which a network's file system may show late to some ranks."""
    end = time.monotonic() + wait_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    manifest = read_step(path)
    if manifest.id != identifier:
        raise CheckpointError(f"{path} is another checkpoint than rank 0 has chosen; all ranks must see one folder")
    return manifest
