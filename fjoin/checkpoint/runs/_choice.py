"""The checkpoint that a restore takes."""

from __future__ import annotations

from pathlib import Path

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from .._commits import read_commit, read_step, verify_files
from .._folder import Folder
from .._manifest import Manifest
from .._newest import newest_verified
from ..values._together import on_each, on_first, wait_until_all_see


def chosen(folder: Folder, mesh: Mesh, step: int | None) -> tuple[Path, Manifest] | None:
    """The newest step that verifies, or a given one; None where the folder holds none. All ranks take the same one.

    Each rank reads its share of the bytes.

    Raises:
        CheckpointError: on all ranks: there are steps, and none verifies; or the given one does not.
    """

    def checked(number: int) -> tuple[Path, Manifest]:
        path = folder.step_path(number)
        identifier = on_first(mesh, f"the choice of step {number}", lambda: _identifier(folder, number))
        wait_until_all_see(mesh, path)

        def check() -> Manifest:
            manifest = read_step(path)
            if manifest.id != identifier:
                raise CheckpointError(f"{path} is another checkpoint than on rank 0; all ranks need one folder")
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
