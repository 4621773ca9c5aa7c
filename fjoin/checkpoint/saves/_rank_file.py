"""What one rank writes in a save: its file, and beside it a list of what is in it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..._errors import described
from ...groups._mesh import Mesh
from .._files import FileEntry, write_small
from .._manifest import Manifest
from .._parts import Leaf, Part
from .._safetensors import write_file
from ..values._snapshot import Snapshot
from ._copies import Copies
from ._plan import Plan


class RankFile:
    """The part of a snapshot that this rank writes.

    Args:
        spread: Whether values that several ranks have are spread over their files.
        copies: Whether to copy the values, since the next step overwrites them: now, or before the storage writes again.
    """

    def __init__(self, mesh: Mesh, plan: Plan, found: Snapshot, spread: bool, copies: bool) -> None:
        self._rank, self._ranks = mesh.rank, mesh.size
        self._written = plan.written(found, spread)
        names = self._written.names
        tensors = dict(zip(names, map(found.values.__getitem__, names.values()), strict=True))
        self._tensors: Copies | dict[str, Any] = tensors
        if copies:
            self._tensors = Copies(tensors, self._written.kinds)
        self._storage = found.storage if copies else None  # until `begin`
        self._side = {
            "numbers": {path: found.values[path] for path in plan.numbers},
            "shared": plan.shared,
            "rank": found.rank,
        }

    def begin(self) -> None:
        """Have the storage wait for the copies before it writes; to be called when the thread that copies has begun."""
        if self._storage is not None and isinstance(self._tensors, Copies):
            self._storage.readers.add(self._tensors.done.wait)
        self._storage = None

    def end(self) -> None:
        """The storage may write in any case, also where `write` has failed."""
        if isinstance(self._tensors, Copies):
            self._tensors.release()

    def write(self, folder: Path) -> None:
        """Write the file, then the list, which appears as a whole."""
        name = f"rank-{self._rank:05d}-of-{self._ranks:05d}.safetensors"
        tensors = self._tensors.tensors() if isinstance(self._tensors, Copies) else self._tensors
        self._tensors = {}
        entry = write_file(folder / name, tensors, {"format": "pt"})
        side = json.dumps(self._side | {"file": asdict(entry)})
        self._report(folder, f'{side[:-1]}, "leaves": {self._written.leaves}}}')

    def fail(self, folder: Path, error: Exception) -> None:
        """Tell rank 0 why nothing has been written."""
        self._report(folder, json.dumps({"error": described(error)}))

    def _report(self, folder: Path, side: str) -> None:
        new = folder / f"{side_name(self._rank)}.new"
        write_small(new, side.encode())
        os.rename(new, folder / side_name(self._rank))


def side_name(rank: int) -> str:
    """The name of a rank's list in the temporary folder, until rank 0 has put it into the manifest."""
    return f"rank-{rank:05d}.json"


def add_side(manifest: Manifest, rank: int, side: dict[str, Any]) -> None:
    """Put into the manifest what a rank has written."""
    manifest.files.append(FileEntry(**side["file"]))
    for path, one in side["leaves"].items():
        name, of_rank, start = one["part"]
        leaf = manifest.leaves.setdefault(path, Leaf(one["shape"], one["dtype"], one["placement"], []))
        leaf.parts.append(Part(rank, name, of_rank, start))
    for path, value in side["numbers"].items():
        held = manifest.numbers.setdefault(path, [])
        if not held or path not in side["shared"]:
            held.append(value)
    manifest.ranks.append(side["rank"])
