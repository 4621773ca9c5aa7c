"""What ranks do together in a save or a load: an error of one is an error of all."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..._errors import CheckpointError, described
from ...groups._mesh import Mesh


def on_first(mesh: Mesh, occasion: str, make: Callable[[], Any]) -> Any:
    """The JSON value that rank 0 makes; its error is raised on all ranks."""
    return _together(mesh, occasion, make if mesh.rank == 0 else lambda: None)[0]


def on_each(
    mesh: Mesh, occasion: str, make: Callable[[], Any], same: Callable[[Any], dict[str, Any]] | None = None
) -> Any:
    """The value that this rank makes, once all ranks have made theirs.

    Args:
        same: From the value to what must be the same on all ranks: name -> JSON.

    Raises:
        CheckpointError: another rank has failed, or has something else where `same` says.
        Exception: the error of this rank.
    """
    made: list[Any] = []

    def shown() -> Any:
        made.append(make())
        return None if same is None else same(made[0])

    found = _together(mesh, occasion, shown)
    for rank, facts in enumerate(found) if same is not None else ():
        for name, value in facts.items():
            if value != found[0][name]:
                raise CheckpointError(
                    f"{occasion}: {name} is {reprlib.repr(value)} on rank {rank}, and {reprlib.repr(found[0][name])} on rank 0; it must "
                    f"be the same on all ranks",
                    rank=rank,
                )
    return made[0]


def wait_until_all_see(mesh: Mesh, path: Path, wait_s: float = 5.0) -> None:
    """Wait until all ranks see a path, which a network's file system may show late to some.

    Raises:
        CheckpointError: on all ranks: some do not see it.
    """
    end = time.monotonic() + wait_s
    while True:
        found = mesh.exchange(f"a look for {path.name}", [path.exists(), time.monotonic() > end], list)
        blind = [rank for rank, (sees, _) in enumerate(found) if not sees]
        if not blind:
            return
        if any(late for _, late in found):
            raise CheckpointError(f"{path} is not there on the ranks {blind}; all ranks need one folder", rank=blind[0])
        time.sleep(0.1)


def _together(mesh: Mesh, occasion: str, make: Callable[[], Any]) -> list[Any]:
    own: Exception | None = None
    try:
        shown = {"value": make()}
    except Exception as error:  # the other ranks wait for this one
        own, shown = error, {"error": described(error)}
    found = mesh.exchange(occasion, shown, list)
    if own is not None:
        raise own
    for rank, one in enumerate(found):
        if "error" in one:
            raise CheckpointError(f"rank {rank} failed in {occasion}: {one['error']}", rank=rank)
    return [one["value"] for one in found]
