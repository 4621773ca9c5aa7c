"""The newest step of a run that can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import CheckpointError
from ._folder import Folder
from ._leaves import Leaves
from ._manifest import Manifest


class Newest(NamedTuple):
    """The newest step that can be read, what was read of it, and the newer ones that cannot, with the reasons."""

    step: int
    found: Any
    refused: list[tuple[int, str]]


def verified(folder: Folder, step: int) -> tuple[Path, Manifest]:
    """As `folder.read`, once all bytes of the step have been checked."""
    path, manifest = folder.read(step)
    with Leaves(path, manifest) as leaves:
        leaves.verify()
    return path, manifest


def newest_verified(
    folder: Folder, read: Callable[[int], Any] | None = None, steps: Sequence[int] | None = None
) -> Newest | None:
    """The newest step that can be read, or None where the folder holds no step at all.

    Args:
        read: Reads a step, or raises a CheckpointError; by default `verified`.
        steps: All steps, ascending; by default those that the folder shows.

    Raises:
        CheckpointError: There are steps, and none can be read; each is named with the reason.
    """
    refused: list[tuple[int, str]] = []
    for step in reversed(folder.all_steps() if steps is None else steps):
        try:
            found = read(step) if read else verified(folder, step)
        except CheckpointError as error:
            refused.append((step, str(error)))
        else:
            return Newest(step, found, refused)
    if refused:
        reasons = "".join(f"\n  {folder.step_path(step)}: {reason}" for step, reason in refused)
        raise CheckpointError(
            f"{folder.path} holds steps, and none can be read; repair one, or choose another folder to start anew:{reasons}"
        )
    return None
