"""What one rank writes in a save: its file, and beside it a list of what is in it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ...groups._mesh import Mesh
from .._files import FileEntry, write_small
from .._manifest import Manifest
from .._parts import Leaf, Part
from .._safetensors import write_file
from ._snapshot import Snapshot, is_host
from ._writers import Writers


class RankFile:
    """The part of a snapshot that this rank writes.

    Args:
        spread: Whether values that several ranks have are spread over their files.
        copies: Whether to copy the values now, since the next step overwrites them.
    """

    def __init__(self, mesh: Mesh, found: Snapshot, spread: bool, copies: bool) -> None:
        self._rank, self._ranks = mesh.rank, mesh.size
        places = dict(Writers(mesh.shape, mesh.rank, spread).mine(found))
        self._tensors: dict[str, Tensor] = {place.name: found.values[path] for path, place in places.items()}
        if copies:
            self._tensors = {name: value.to("cpu", copy=True) for name, value in self._tensors.items()}
        numbers = {path: value for path, value in found.values.items() if is_host(value)}
        leaves = {}
        for path, place in places.items():
            alone = found.by_content and place.rank is not None  # other ranks may have another form, or no such value
            leaves[place.name if alone else path] = {
                "shape": list(place.shape),
                "dtype": str(found.values[path].dtype).removeprefix("torch."),
                "placement": _placement_of(found, path) | ({"of": path, "rank": place.rank} if alone else {}),
                "part": [place.name, None if alone else place.rank, place.start],
            }
        self._side: dict[str, Any] = {
            "leaves": leaves,
            "numbers": numbers,
            "shared": [path for path in numbers if set(found.places[path].equal) == set(mesh.shape)],
            "rank": found.rank,
        }

    def write(self, folder: Path) -> None:
        """Write the file, then the list, which appears as a whole."""
        name = f"rank-{self._rank:05d}-of-{self._ranks:05d}.safetensors"
        entry = write_file(folder / name, self._tensors, {"format": "pt"})
        self._tensors = {}
        self.report(folder, {**self._side, "file": asdict(entry)})

    def report(self, folder: Path, side: dict[str, Any]) -> None:
        """Tell rank 0 of what has been written, or why it has not."""
        new = folder / f"{side_name(self._rank)}.new"
        write_small(new, json.dumps(side).encode())
        os.rename(new, folder / side_name(self._rank))


def side_name(rank: int) -> str:
    """The name of a rank's list in the temporary folder, until rank 0 has put it into the manifest."""
    return f"rank-{rank:05d}.json"


def _placement_of(found: Snapshot, path: str) -> dict[str, Any]:
    place = found.places[path]
    return {"equal": list(place.equal), "cut": place.cut, "merge": place.merge.value}


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
