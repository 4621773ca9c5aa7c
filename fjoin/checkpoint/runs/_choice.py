"""The checkpoint that a restore takes."""

from __future__ import annotations

import contextlib

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from .._commits import read_commit
from .._folder import Folder
from .._leaves import Leaves
from .._newest import newest_verified
from ..values._together import on_each, on_first, wait_until_all_see


def chosen(folder: Folder, mesh: Mesh, step: int | None) -> Leaves | None:
    """The newest step that verifies, or a given one; None where the folder holds none. All ranks take the same one.

    Each rank checks its share of the bytes, and has the files open that it has checked.

    Raises:
        CheckpointError: on all ranks: there are steps, and none verifies; or the given one does not.
    """

    def checked(number: int) -> Leaves:
        path = folder.step_path(number)
        identifier = on_first(mesh, f"the choice of step {number}", lambda: read_commit(path).id)

        with contextlib.ExitStack() as stack:

            def check() -> Leaves:
                _, manifest = folder.read(number)
                if manifest.id != identifier:
                    raise CheckpointError(f"{path} is another checkpoint than on rank 0; all ranks need one folder")
                leaves = stack.enter_context(Leaves(path, manifest))
                leaves.verify((mesh.rank, mesh.size))
                return leaves

            leaves: Leaves = on_each(mesh, f"the check of step {number}", check)
            stack.pop_all()  # they stay open
            return leaves

    def steps() -> list[int]:
        if step is not None:
            folder.refuse_missing(step)
        return folder.all_steps() if step is None else [step]

    found = on_first(mesh, "a look for checkpoints", steps)
    if found:
        wait_until_all_see(mesh, folder.step_path(found[-1]))
    if step is not None:
        return checked(step)
    newest = newest_verified(folder, checked, found)
    return None if newest is None else newest.found
