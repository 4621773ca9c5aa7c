"""What ranks do together in a save or a load: an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._errors import CheckpointError
from ...groups._mesh import Mesh


def on_first(mesh: Mesh, occasion: str, make: Callable[[], Any]) -> Any:
    """The JSON value that rank 0 makes; its error is raised on all ranks."""
    return _together(mesh, occasion, make if mesh.rank == 0 else lambda: None)[0]


def on_each(mesh: Mesh, occasion: str, make: Callable[[], Any]) -> Any:
    """The value that this rank makes, once all ranks have made theirs.

    Raises:
        CheckpointError: another rank has failed.
        Exception: the error of this rank.
    """
    made: list[Any] = []
    _together(mesh, occasion, lambda: made.append(make()))
    return made[0]


def _together(mesh: Mesh, occasion: str, make: Callable[[], Any]) -> list[Any]:
    own: Exception | None = None
    try:
        shown = {"value": make()}
    except Exception as error:  # the other ranks wait for this one
        own, shown = error, {"error": f"{type(error).__name__}: {error}"}
    found = mesh.exchange(occasion, shown, list)
    if own is not None:
        raise own
    for rank, one in enumerate(found):
        if "error" in one:
            raise CheckpointError(f"rank {rank} failed in {occasion}: {one['error']}", rank=rank)
    return [one["value"] for one in found]
