"""A load: every rank reads its values, and all of them succeed or none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from .._leaves import Leaves
from .._manifest import Manifest
from .._parts import DTYPES, Leaf, Part
from ._snapshot import Snapshot
from ._writers import Writers


class Load:
    """Reads the values of this rank from a step's folder.

    Args:
        folder: The step's folder.
        manifest: Its manifest.
        mesh: The ranks of this run.
    """

    def __init__(self, folder: Path, manifest: Manifest, mesh: Mesh) -> None:
        self._folder, self.manifest, self._mesh = folder, manifest, mesh
        if dict(manifest.axes) != dict(mesh.shape):
            raise CheckpointError(
                f"{folder} is of the mesh {dict(manifest.axes)}, but this run has {dict(mesh.shape)}; load it on a mesh of the same axes"
            )

    def values(self, like: Snapshot, fresh: tuple[str, ...] = ()) -> dict[str, Any]:
        """Name -> value of this rank.

        Args:
            like: What a run has at its start: names, shapes and placements.
            fresh: Names, or beginnings of names, that keep the values of the start.

        Raises:
            CheckpointError: a value is missing or damaged, or has another shape or dtype.
        """
        found: dict[str, Any] = {}
        with Leaves(self._folder, self.manifest) as leaves:
            for name in [*self.manifest.leaves, *self.manifest.numbers]:
                if not name.startswith(fresh or ("\0",)):
                    found[name] = self._value(leaves, name, like)
        return found

    def _value(self, leaves: Leaves, name: str, like: Snapshot) -> Any:
        if name in self.manifest.numbers:
            held = self.manifest.numbers[name]
            return held[self._mesh.rank if len(held) > 1 else 0]
        leaf = self.manifest.leaves[name]
        if leaf.placement.get("cut") is not None:
            return self._slice(leaves, name, leaf, like)
        rank = Writers(self._mesh.shape, self._mesh.rank).group(tuple(leaf.placement["equal"]))
        part = next((part for part in leaf.parts if part.rank in (None, rank)), None)
        if part is None:
            raise CheckpointError(f"{self._folder} lacks {name!r} of rank {rank}; use another step")
        return leaves.part(name, part)

    def _slice(self, leaves: Leaves, name: str, leaf: Leaf, like: Snapshot) -> Tensor:
        """This rank's slice of a leaf, from the parts that hold it."""
        path = like.leaf_of(name) if like.pieces is not None else None
        if path is None or like.pieces is None:
            raise CheckpointError(f"{self._folder} has slices of {name!r}, but this pipeline does not shard it")
        start, stop = like.pieces.slices[path]
        parts = self._of_group(leaf)
        if all(part.start is None for part in parts):  # on one rank as a whole
            if stop:
                return leaves.part(name, parts[0])
            shape = like.values[name].shape if name in like.values else (0,)
            return torch.zeros(shape, dtype=DTYPES[leaf.dtype])
        return _between(leaves, name, leaf, parts, start, stop)

    def _of_group(self, leaf: Leaf) -> list[Part]:
        """The parts of the ranks whose slices make up the value that this rank has a slice of."""
        equal = (*leaf.placement["equal"], leaf.placement["cut"])
        group = Writers(self._mesh.shape, self._mesh.rank)
        wanted = group.group(equal)
        of = {rank: Writers(self._mesh.shape, rank).group(equal) for rank in range(self._mesh.size)}
        return [part for part in leaf.parts if part.rank is None or of[part.rank] == wanted]


def _between(leaves: Leaves, name: str, leaf: Leaf, parts: list[Part], start: int, stop: int) -> Tensor:
    """The elements from `start` to `stop` of a flat leaf."""
    out, filled = torch.empty(stop - start, dtype=DTYPES[leaf.dtype]), 0
    for part in sorted(parts, key=lambda part: part.start or 0):
        first = part.start or 0
        if first >= stop or filled == stop - start:
            break
        values = leaves.part(name, part) if first + leaves.check(name, part) > start else None
        if values is None:
            continue
        low, high = max(start, first), min(stop, first + len(values))
        out[low - start : high - start] = values[low - first : high - first]
        filled += high - low
    if filled != stop - start:
        raise CheckpointError(
            f"the parts of {name!r} do not hold the elements from {start} to {stop}; use another step"
        )
    return out
