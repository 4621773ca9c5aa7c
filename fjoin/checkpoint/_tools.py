"""What one does with a checkpoint outside a run: show, verify, export. A path is a run's folder or a step's."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from .._errors import CheckpointError
from ..transforms.base import Placement
from ._files import sync_folder, typed_errors, write_file
from ._folder import Folder
from ._leaves import SavedLeaves
from ._manifest import read_step
from ._values import under


def show(path: Path | str) -> str:
    """A text: the step, where it is from, and its leaves with dtype, shape, placement and number of parts.

    Raises:
        CheckpointError: There is no step, or its manifest is damaged.
    """
    step = _step_folder(path)
    manifest = read_step(step)
    size = sum(file.size for file in manifest.files)
    lines = [
        f"{step}: step {manifest.step}, {len(manifest.leaves)} leaves, {size} bytes in {len(manifest.files)} files",
        f"run {manifest.run}, id {manifest.id}, after {manifest.parent or 'no other'}",
        f"axes {manifest.axes}, versions {manifest.library}",
        *(f"note: {note}" for note in manifest.notes),
    ]
    for name, leaf in manifest.leaves.items():
        place = Placement(tuple(leaf.placement.get("equal", ())), leaf.placement.get("cut"))
        lines.append(f"{name}: {leaf.dtype} {leaf.shape}, {place}, parts: {len(leaf.parts)}")
    return "\n".join([*lines, *(f"{name}: {numbers}" for name, numbers in manifest.numbers.items())])


def verify(path: Path | str) -> list[str]:
    """What is wrong with a step, whose every byte is read: damaged, missing and unexpected files. Empty: nothing.

    Raises:
        CheckpointError: There is no step.
    """
    step = _step_folder(path)
    try:
        with contextlib.closing(SavedLeaves(step, read_step(step))) as leaves:
            return leaves.problems()
    except CheckpointError as error:
        return [str(error)]


def export(path: Path | str, out: Path | str) -> None:
    """Write the parameters of a step, whole, to one new file of the format safetensors, durably. They must fit in
    memory.

    Raises:
        CheckpointError: There is no step, it is damaged, has no parameters, or they differ by rank; or `out` exists.
    """
    step, out = _step_folder(path), Path(out)
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists and is not replaced; choose another name")
    with contextlib.closing(SavedLeaves(step, read_step(step))) as leaves:
        leaves.verify()
        names = leaves.manifest.leaves
        params = {path: leaves.whole(name) for path, name in under({name: name for name in names}, "params").items()}
    if not params:
        raise CheckpointError(f"{step} has no leaves under 'params.'; it has {sorted(names)[:5]}")
    temporary = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex}")
    write_file(temporary, params)
    with typed_errors(f"rename {temporary} to {out}"):
        os.rename(temporary, out)
    sync_folder(out.parent)


def _step_folder(path: Path | str) -> Path:
    """The folder itself where it is that of a step, else that of the newest step in it."""
    path = Path(path)
    if os.path.lexists(path / "COMMIT") or os.path.lexists(path / "manifest.json"):
        return path
    if (newest := Folder(path).newest()) is None:
        raise CheckpointError(f"{path} holds no step, expected the folder of a run or of a step")
    return Folder(path).step_path(newest)
