"""Restores a checkpoint: chooses a step that verifies, and reads the values of this rank."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..groups import Communicator
from ..records import on_each, on_first, put_together, wait_until_all_see
from ..transforms.axes import Grid
from ..transforms.base import Merge, checks, trees
from ..transforms.layout import Slice, merged
from ._files import DTYPES, decoding
from ._folder import Folder
from ._leaves import SavedLeaves
from ._manifest import Leaf, LeafPart, Manifest, read_commit
from ._sources import DATA, LOOP, Source, position_of, warn_apart
from ._values import Snapshot, Values, given, matches, under

_OTHER = {"params": "buffers", "buffers": "params"}


class Load:
    """Reads the values of this rank from a checkpoint.

    Args:
        leaves: Those of the checkpoint.
        mesh: The ranks of this run.
        like: What a run has at its start: names, shapes and placements.
        fresh: Names, beginnings of names, or patterns with `*`, that keep the values of the start.

    Attributes:
        values: Name -> value of this rank. Taking one raises CheckpointError where it is missing or damaged, or has
            another dtype.

    Raises:
        CheckpointError: the mesh has other axes; `fresh` names nothing; a value has no place on this number of ranks.
    """

    def __init__(self, leaves: SavedLeaves, mesh: Communicator, like: Snapshot, fresh: tuple[str, ...] = ()) -> None:
        self._leaves, self._folder, manifest = leaves, leaves.folder, leaves.manifest
        self.manifest, self._mesh, self._like = manifest, mesh, like
        self._same = dict(manifest.axes) == dict(mesh.shape)
        if manifest.axes.keys() != mesh.shape.keys():
            both = f"of a mesh with the axes {list(manifest.axes)}, but this run has {list(mesh.shape)}"
            raise CheckpointError(f"{self._folder} is {both}; load it on a mesh of the same axes, of any sizes")
        self._here, self._there = Grid(mesh.shape), Grid(manifest.axes)
        # By its name in the file what a value is called, which several ranks may have by themselves.
        called = {name: leaf.placement.get("of", name) for name, leaf in manifest.leaves.items()}
        called |= {name: name for name in manifest.numbers}
        names = {*called.values(), *like.values}
        for pattern in fresh:
            if not any(matches(name, [pattern]) for name in names):
                raise CheckpointError(f"fresh={pattern!r} is no name; there are {sorted(names)[:8]} and others")
        self.values = Values({name: given(value) for name, value in like.values.items() if matches(name, fresh)})
        for name, of in called.items():
            if not matches(of, fresh):
                self._add(name)

    def _add(self, name: str) -> None:
        placement = self.manifest.leaves[name].placement if name in self.manifest.leaves else {}
        if "of" not in placement:
            kind, _, path = name.partition(".")
            moved = f"{_OTHER.get(kind)}.{path}"  # a parameter that was frozen, or is now
            here = moved if name not in self._like.values and moved in self._like.values else name
            self.values.reads.setdefault(here, partial(self._value, name, here))
            return
        of, rank = placement["of"], self._mesh.rank if self._same else 0  # a value that one rank had by itself
        if not self._same and not of.startswith(f"{DATA}."):
            raise self._unmerged(of, "the ranks had values of their own")
        if placement["rank"] == rank:
            self.values.reads[of] = partial(self._leaves.part, name, self.manifest.leaves[name].parts[0])

    def own(self) -> dict[str, Any]:
        """What only this rank has saved; on other numbers of ranks that of rank 0."""
        ranks = self.manifest.ranks
        if self._same or not ranks:
            return ranks[self._mesh.rank] if ranks else {}
        if any(one.get("objects") != ranks[0].get("objects") for one in ranks):
            text = f"the ranks of {self._there.sizes} had numbers of their own in their state dicts"
            raise CheckpointError(f"{self._folder}: {text}; load it on as many ranks; save a loop by data=loop")
        return ranks[0]

    def _value(self, name: str, here: str, memory: Tensor | None) -> Any:
        if name in self.manifest.numbers:
            return self._number(name)
        leaf, own = self.manifest.leaves[name], self._like.values.get(here)
        if isinstance(own, Tensor) and own.dtype is not DTYPES[leaf.dtype]:
            both = f"{name!r} is {leaf.dtype}, but here {own.dtype}"
            raise CheckpointError(f"{self._folder}: {both}; begin with parameters and a pipeline of the saved dtypes")
        if here.startswith("buffers.") and here != name and leaf.parts[0].rank is not None:
            raise self._unmerged(name, f"the ranks had values of their own, and {here!r} has one")
        if leaf.placement.get("cut") is not None:
            value = self._slice(name, here, leaf, memory)
            # On one rank a step has whole leaves where others have flat slices.
            return value.view(own.shape) if isinstance(own, Tensor) and own.numel() == value.numel() else value
        place = self._like.places.get(here)
        cut = self._like.slice_of(here) if place is not None and place.cut else None
        read = partial(self._leaves.part, name, leaf.parts[0])
        if leaf.parts[0].rank is not None:
            read = partial(self._merged, name, leaf)
        return read(memory) if cut is None else self._own(here, cut, leaf, read)

    def _own(self, here: str, own: Slice, leaf: Leaf, read: Callable[..., Tensor]) -> Tensor:
        """This rank's part of a value of which the file has the whole."""
        if not leaf.shape:  # a value that all slices have in common
            return read()
        if not own.stop:  # another rank's
            shape = self._like.values[here].shape if here in self._like.values else leaf.shape if own.whole else (0,)
            return torch.zeros(shape, dtype=DTYPES[leaf.dtype])
        return read() if own.whole else read().reshape(-1)[own.start : own.stop]

    def _number(self, name: str) -> Any:
        held, rank = self.manifest.numbers[name], self._mesh.rank
        merge = self._like.places[name].merge if name in self._like.places else Merge.REFUSE
        if not self._same and merge is Merge.RESTART:
            return self._like.values[name]
        if not self._same and merge is Merge.MEAN:
            return max(held)
        return held[rank if rank < len(held) else 0]

    def _merged(self, name: str, leaf: Leaf, memory: Tensor | None = None) -> Tensor:
        """The value of this rank, from one for each place along the axes over which they differ."""
        differs = [axis for axis in self.manifest.axes if axis not in leaf.placement["equal"]]
        parts = {tuple(self._there.place(part.rank or 0, differs).values()): part for part in leaf.parts}
        place = tuple(self._here.place(self._mesh.rank, differs).values())
        sizes, merge = [self._mesh.shape[axis] for axis in differs], Merge(leaf.placement["merge"])
        if sizes == [self.manifest.axes[axis] for axis in differs]:
            if place not in parts:
                raise CheckpointError(f"{self._folder} lacks {name!r} of rank {self._mesh.rank}; use another step")
            return self._leaves.part(name, parts[place], memory)
        values = {one: self._leaves.part(name, part) for one, part in parts.items()}
        try:
            return merged(values, sizes, place, merge, self._like.values.get(name))
        except ValueError as error:
            raise self._unmerged(name, error) from None

    def _unmerged(self, name: str, why: object) -> CheckpointError:
        remedy = f"start it anew by fresh=({name!r},)"
        if name.startswith("params."):
            remedy = "save after state = step.flush(state), where that makes them equal"
        ranks = f"of {dict(self.manifest.axes)} cannot be loaded on {dict(self._mesh.shape)}"
        return CheckpointError(f"{self._folder}: {name!r} {ranks}: {why}; {remedy}")

    def _slice(self, name: str, here: str, leaf: Leaf, memory: Tensor | None) -> Tensor:
        """This rank's slice of a leaf, from the parts that hold it; the whole leaf where it is not sharded here."""
        own, parts = self._like.slice_of(here), self._of_group(leaf)
        if own is None:
            return self._leaves.between(name, parts, 0, math.prod(leaf.shape)).reshape(leaf.shape)
        if any(part.start is not None for part in parts):
            return self._leaves.between(name, parts, own.start, own.stop, memory)
        return self._own(here, own, leaf, partial(self._leaves.part, name, parts[0], memory))

    def _of_group(self, leaf: Leaf) -> list[LeafPart]:
        """The parts of the ranks whose slices make up the value that this rank has a slice of."""
        differs = [axis for axis in self.manifest.axes if axis not in (*leaf.placement["equal"], leaf.placement["cut"])]
        mine = self._here.place(self._mesh.rank, differs)
        parts = [part for part in leaf.parts if part.rank is None or self._there.place(part.rank, differs) == mine]
        if not parts or any(self.manifest.axes[axis] != self._mesh.shape[axis] for axis in differs):
            what = f"{self._folder} has slices that differ over {differs}, of {dict(self.manifest.axes)}"
            raise CheckpointError(f"{what}; load it on as many ranks of these")
        return parts


def empty_params(leaves: Mapping[str, Leaf], fresh: tuple[str, ...], trees: Sequence[str]) -> Any:
    """Path -> a parameter without values, of a manifest's leaves; for trees with names one such dict for each.

    Raises:
        CheckpointError: parameters are to start anew, which are not given.
    """
    names = [name for name in leaves if name.startswith("params.")]
    if anew := [name for name in names if matches(name, fresh)]:
        raise CheckpointError(f"fresh= names {anew[0]!r}, which has no value at the start; pass restore(params, ...)")
    forms = {name: torch.zeros(leaves[name].shape, dtype=DTYPES[leaves[name].dtype]) for name in names}
    found = {tree: under(forms, f"params.{tree}" if tree else "params") for tree in trees}
    return found.get("", found)


def filled(prefix: str, tree: Any, values: Values) -> Any:
    """A tree of tensors with the values under a prefix in their place, as far as there are such."""
    saved = values.under(prefix)

    def place(path: str, leaf: Tensor) -> Tensor:
        value = saved[path] if path in saved else leaf
        if value.shape != leaf.shape:
            both = f"{prefix}.{path} has the shape {tuple(value.shape)}, but here {tuple(leaf.shape)}"
            raise CheckpointError(f"{both}; the checkpoint is of another model")
        return value.to(leaf.device)

    return trees.map_with_path(place, tree)


def chosen(folder: Folder, mesh: Communicator, step: int | None) -> SavedLeaves | None:
    """The newest step that verifies, or a given one; None if the folder holds none. All ranks take the same one.

    Each rank checks its share of the bytes, and has the files open that it has checked.

    Raises:
        CheckpointError: on all ranks: there are steps, and none verifies; or the given one does not.
    """

    def checked(number: int) -> SavedLeaves:
        path = folder.step_path(number)
        identifier = on_first(mesh, f"the choice of step {number}", lambda: read_commit(path).id)

        with contextlib.ExitStack() as stack:

            def check() -> SavedLeaves:
                _, manifest = folder.read(number)
                if manifest.id != identifier:
                    raise CheckpointError(f"{path} is another checkpoint than on rank 0; all ranks need one folder")
                leaves = SavedLeaves(path, manifest)
                stack.callback(leaves.close)
                leaves.verify((mesh.rank, mesh.size))
                return leaves

            leaves: SavedLeaves = on_each(mesh, f"the check of step {number}", check)
            stack.pop_all()  # they stay open
            return leaves

    def steps() -> list[int]:
        if step is not None:
            folder.refuse_missing(step)
        return folder.steps() if step is None else [step]

    found = on_first(mesh, "a look for checkpoints", steps)
    if found:
        wait_until_all_see(mesh, folder.step_path(found[-1]))
    refused = ""
    for number in reversed(found):
        try:
            return checked(number)
        except CheckpointError as error:
            if step is not None:
                raise
            refused += f"\n  {folder.step_path(number)}: {error}"
    if refused:
        text = f"{folder.path} holds steps, and none can be read"
        raise CheckpointError(f"{text}; repair one, or choose another folder to start anew:{refused}")
    return None


def restored(
    folder: Folder,
    source: Source,
    params: Any,
    buffers: dict[str, Tensor] | None,
    step: int | None,
    fresh: tuple[str, ...],
    data: Any,
) -> tuple[Any, Manifest, Any] | None:
    """(state, manifest, extra) of the newest checkpoint that verifies, or None; the arguments are those of
    `Checkpoints.restore`.

    Raises:
        CheckpointError: on all ranks.
    """
    mesh, resumes, data = source.mesh, data is None, None if data is False else data  # False: the caller wants none
    asked = {"step": step, "fresh": list(fresh), "the presence of data": data is not None}
    on_each(mesh, "the start of a load", lambda: step is None or checks.whole_number("step", step, 0), lambda _: asked)
    leaves = chosen(folder, mesh, step)
    if leaves is None:
        warn_apart(data, (0, 0))
        return None
    manifest, where = leaves.manifest, leaves.folder / "manifest.json"

    def read_params() -> tuple[Any, Any]:
        found = source.snapshot(state)
        with decoding(where):
            values = Load(leaves, mesh, found, fresh).values
            return filled("params", params, values), buffers and filled("buffers", buffers, values)

    def read() -> tuple[Callable[[], Any], Callable[[], None], Any]:
        found = source.snapshot(state)
        with decoding(where):
            load = Load(leaves, mesh, found, fresh)
            own, values = load.own(), load.values
            place = position_of(values, own, data)
            return source.load(state, values, own), place, put_together(manifest.extra, values, plain=True)

    with contextlib.closing(leaves):
        if params is None:
            params = empty_params(manifest.leaves, fresh, source.trees)
        state = source.start(params, buffers)
        if fresh and source.trees:  # what starts anew starts from the parameters and buffers of the checkpoint
            state = source.start(*on_each(mesh, "the parameters of a checkpoint", read_params))
        take, place, extra = on_each(mesh, "the values of a checkpoint", read)  # nothing has changed yet
        loaded = on_each(mesh, "the end of a load", lambda: (take(), place())[0])
    if manifest.spec != source.spec and not fresh and mesh.rank == 0:
        text = f"the checkpoint is of {manifest.spec}, and this run of {source.spec}; its values are taken"
        warnings.warn(text, stacklevel=3)
    if resumes and mesh.rank == 0 and manifest.ranks[0].keys() & {DATA, LOOP}:
        text = "the checkpoint is of a place in a loop over data; without data= the loop begins its first epoch anew"
        warnings.warn(f"{text}; pass data=loop to save and restore, or data=False if the script skips", stacklevel=3)
    return loaded, manifest, extra
