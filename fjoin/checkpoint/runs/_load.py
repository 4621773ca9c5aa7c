"""A load: every rank reads its values, and all of them succeed or none does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from ...transforms.axes.simulator._grid import Grid
from ...transforms.layout._merge import merged
from ...transforms.tree._placement import Merge
from ...transforms.tree._tree import map_with_path
from .._leaves import Leaves
from .._parts import DTYPES, Leaf, Part
from ..values._names import matches
from ..values._snapshot import Snapshot
from ..values._values import Values
from ._positions import is_position


class Load:
    """Reads the values of this rank from a checkpoint.

    Args:
        leaves: Those of the checkpoint.
        mesh: The ranks of this run.
        like: What a run has at its start: names, shapes and placements.
        fresh: Names, beginnings of names, or patterns with `*`, that keep the values of the start.

    Attributes:
        values: Name -> value of this rank. Taking one raises CheckpointError where it is missing or damaged, or has another dtype.

    Raises:
        CheckpointError: the mesh has other axes; `fresh` names nothing; a value has no place on this number of ranks.
    """

    def __init__(self, leaves: Leaves, mesh: Mesh, like: Snapshot, fresh: tuple[str, ...] = ()) -> None:
        self._leaves, folder, manifest = leaves, leaves.folder, leaves.manifest
        self._folder, self.manifest, self._mesh, self._like = folder, manifest, mesh, like
        self._same = dict(manifest.axes) == dict(mesh.shape)
        if manifest.axes.keys() != mesh.shape.keys():
            raise CheckpointError(
                f"{folder} is of a mesh with the axes {list(manifest.axes)}, but this run has {list(mesh.shape)}; load it on a mesh of "
                f"the same axes, of any sizes"
            )
        self._here, self._there = Grid(mesh.shape), Grid(manifest.axes)
        names = {*manifest.leaves, *manifest.numbers, *like.values}
        for pattern in fresh:
            if not any(matches(name, [pattern]) for name in names):
                raise CheckpointError(f"fresh={pattern!r} is no name; there are {sorted(names)[:8]} and others")
        self.values = Values()
        for name, value in like.values.items():
            if matches(name, fresh):
                self.values.set(name, value)
        for name in (*manifest.leaves, *manifest.numbers):
            if not matches(name, fresh):
                self._add(name)

    def _add(self, name: str) -> None:
        placement = self.manifest.leaves[name].placement if name in self.manifest.leaves else {}
        if "of" not in placement:
            self.values.add(name, partial(self._value, name))
            return
        of, rank = placement["of"], self._mesh.rank if self._same else 0  # a value that one rank had by itself
        if not self._same and not is_position(of):
            raise self._unmerged(of, "the ranks had values of their own")
        if placement["rank"] == rank:
            self.values.add(of, partial(self._leaves.part, name, self.manifest.leaves[name].parts[0]))

    def own(self) -> dict[str, Any]:
        """What only this rank has saved; on other numbers of ranks that of rank 0."""
        ranks = self.manifest.ranks
        if self._same or not ranks:
            return ranks[self._mesh.rank] if ranks else {}
        if any(one.get("objects") != ranks[0].get("objects") for one in ranks):
            raise self._unmerged("objects", "the ranks had numbers of their own in their state dicts")
        return ranks[0]

    def _value(self, name: str, memory: Tensor | None) -> Any:
        if name in self.manifest.numbers:
            return self._number(name)
        leaf = self.manifest.leaves[name]
        self._check_dtype(name)
        if leaf.placement.get("cut") is not None:
            return self._slice(name, leaf, memory)
        if leaf.parts[0].rank is None:
            return self._leaves.part(name, leaf.parts[0], memory)
        if not self._same:
            return self._merged(name, leaf)
        rank = self._here.members(self._mesh.rank, leaf.placement["equal"])[0]
        part = next((part for part in leaf.parts if part.rank == rank), None)
        if part is None:
            raise CheckpointError(f"{self._folder} lacks {name!r} of rank {rank}; use another step")
        return self._leaves.part(name, part, memory)

    def _check_dtype(self, name: str) -> None:
        own, saved = self._like.values.get(name), DTYPES[self.manifest.leaves[name].dtype]
        if isinstance(own, Tensor) and own.dtype is not saved:
            raise CheckpointError(
                f"{self._folder}: {name!r} is {saved}, but here {own.dtype}; begin with parameters and a pipeline of the saved dtypes"
            )

    def _number(self, name: str) -> Any:
        held, rank = self.manifest.numbers[name], self._mesh.rank
        merge = self._like.places[name].merge if name in self._like.places else Merge.REFUSE
        if not self._same and merge is Merge.RESTART:
            return self._like.values[name]
        if not self._same and merge is Merge.MEAN:
            return max(held)
        return held[rank if rank < len(held) else 0]

    def _merged(self, name: str, leaf: Leaf) -> Tensor:
        """The value of this rank, from those of another number of ranks."""
        differs = [axis for axis in self.manifest.axes if axis not in leaf.placement["equal"]]
        values = {
            tuple(self._there.place(part.rank or 0, differs).values()): self._leaves.part(name, part)
            for part in leaf.parts
        }
        place = tuple(self._here.place(self._mesh.rank, differs).values())
        if all(self.manifest.axes[axis] == self._mesh.shape[axis] for axis in differs):
            return values[place]
        try:
            return merged(
                values,
                [self._mesh.shape[axis] for axis in differs],
                place,
                Merge(leaf.placement["merge"]),
                self._like.values.get(name),
            )
        except ValueError as error:
            raise self._unmerged(name, error) from None

    def _unmerged(self, name: str, why: object) -> CheckpointError:
        remedy = (
            "save after state = step.flush(state), where that makes them equal"
            if name.startswith("params.")
            else f"start it anew by fresh=({name!r},)"
        )
        return CheckpointError(
            f"{self._folder}: {name!r} of {dict(self.manifest.axes)} cannot be loaded on {dict(self._mesh.shape)}: {why}; {remedy}"
        )

    def _slice(self, name: str, leaf: Leaf, memory: Tensor | None) -> Tensor:
        """This rank's slice of a leaf, from the parts that hold it."""
        own = self._like.slice_of(name)
        if own is None:
            raise CheckpointError(f"{self._folder} has slices of {name!r}, but here it is not sharded")
        start, stop = own.start, own.stop
        parts = self._of_group(leaf)
        if all(part.start is None for part in parts):  # on one rank as a whole
            if stop:
                return self._leaves.part(name, parts[0], memory)
            shape = self._like.values[name].shape if name in self._like.values else leaf.shape
            return torch.zeros(shape, dtype=DTYPES[leaf.dtype])
        same = next(
            (part for part in parts if (part.start, self._leaves.check(name, part)) == (start, stop - start)), None
        )
        if same is not None:
            return self._leaves.part(name, same, memory)
        return _between(self._leaves, name, leaf, parts, start, stop)

    def _of_group(self, leaf: Leaf) -> list[Part]:
        """The parts of the ranks whose slices make up the value that this rank has a slice of."""
        differs = [axis for axis in self.manifest.axes if axis not in (*leaf.placement["equal"], leaf.placement["cut"])]
        mine = self._here.place(self._mesh.rank, differs)
        parts = [part for part in leaf.parts if part.rank is None or self._there.place(part.rank, differs) == mine]
        if not parts or any(self.manifest.axes[axis] != self._mesh.shape[axis] for axis in differs):
            raise CheckpointError(
                f"{self._folder} has slices that differ over {differs}, of {dict(self.manifest.axes)}; load it on as many ranks of these"
            )
        return parts


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


def empty_params(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """Path -> a parameter without values, of a manifest's leaves."""
    return {
        name.removeprefix("params."): torch.zeros(leaf.shape, dtype=DTYPES[leaf.dtype])
        for name, leaf in leaves.items()
        if name.startswith("params.")
    }


def filled(prefix: str, tree: Any, values: Values) -> Any:
    """A tree of tensors with the values under a prefix in their place, as far as there are such."""
    saved = values.under(prefix)
    return map_with_path(lambda path, leaf: saved[path].to(leaf.device) if path in saved else leaf, tree)


def refuse_fresh_params(leaves: Mapping[str, Any], fresh: tuple[str, ...]) -> None:
    """Raise CheckpointError where parameters are to start anew, which are not given."""
    if names := [name for name in leaves if name.startswith("params.") and matches(name, fresh)]:
        raise CheckpointError(
            f"fresh= names {names[0]!r}, whose value at the start is not known; pass restore(params, ...)"
        )
