"""Restores a checkpoint: chooses a verified step, and reads the values of this rank and the position of its loop over data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..agreement import on_each, on_first, wait_until_all_see
from ..groups import Communicator
from ..transforms.axes import Grid
from ..transforms.base import Merge, map_with_path
from ..transforms.layout import merged
from ._files import decoding
from ._folder import Folder
from ._leaves import Leaves, newest_verified
from ._manifest import Leaf, Part, read_commit
from ._safetensors import DTYPES
from ._sources import Source
from ._values import Snapshot, Values, matches, put_together, taken_apart

_NAME = "data"


def add_position(found: Snapshot, data: Any) -> None:
    """Add the position of this rank, which is its own.

    Raises:
        TypeError: `data` is no loop over data.
    """
    if not callable(getattr(data, "state_dict", None)) or not hasattr(data, "stopped"):
        raise TypeError(
            f"data must be the loop over the loader, batches = step.join(loader), got a {type(data).__name__}: a loader is one batch "
            f"ahead of the loop"
        )
    tensors: dict[str, Tensor] = {}
    found.rank[_NAME] = taken_apart(data.state_dict(), _NAME, tensors)
    found.add_by_content(tensors, ())


def position_of(values: Mapping[str, Any], own: Mapping[str, Any], data: Any) -> Callable[[], None]:
    """A function that loads the position into the loop.

    Raises:
        CheckpointError: the checkpoint has no position.
    """
    if data is None:
        return lambda: None
    if own.get(_NAME) is None:
        raise CheckpointError("the checkpoint has no position of data; restore it without data=, as it was saved")
    return partial(data.load_state_dict, put_together(own[_NAME], values))


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

    def __init__(self, leaves: Leaves, mesh: Communicator, like: Snapshot, fresh: tuple[str, ...] = ()) -> None:
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
        if not self._same and not of.startswith(f"{_NAME}."):
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
        raise CheckpointError(f"no part of {name!r} holds the elements from {start} to {stop}; use another step")
    return out


def empty_params(leaves: Mapping[str, Leaf], fresh: tuple[str, ...]) -> dict[str, Tensor]:
    """Path -> a parameter without values, of a manifest's leaves.

    Raises:
        CheckpointError: parameters are to start anew, which are not given.
    """
    names = [name for name in leaves if name.startswith("params.")]
    if anew := [name for name in names if matches(name, fresh)]:
        raise CheckpointError(f"fresh= names {anew[0]!r}, which has no value at the start; pass restore(params, ...)")
    forms = {name.removeprefix("params."): leaves[name] for name in names}
    return {path: torch.zeros(leaf.shape, dtype=DTYPES[leaf.dtype]) for path, leaf in forms.items()}


def filled(prefix: str, tree: Any, values: Values) -> Any:
    """A tree of tensors with the values under a prefix in their place, as far as there are such."""
    saved = values.under(prefix)
    return map_with_path(lambda path, leaf: saved[path].to(leaf.device) if path in saved else leaf, tree)


def chosen(folder: Folder, mesh: Communicator, step: int | None) -> Leaves | None:
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


class Restored(NamedTuple):
    """What a restore gives."""

    state: Any
    run: str
    step: int
    extra: Any
    note: str  # how the pipelines differ


def restored(
    folder: Folder,
    source: Source,
    params: Any,
    buffers: dict[str, Tensor] | None,
    step: int | None,
    fresh: tuple[str, ...],
    data: Any,
) -> Restored | None:
    """The newest checkpoint that verifies, or None where there is none; the arguments are those of `Checkpoints.restore`.

    Raises:
        CheckpointError: on all ranks.
    """
    asked = {"step": step, "fresh": list(fresh), "the presence of data": data is not None}
    on_each(source.mesh, "the start of a restore", dict, lambda _: asked)
    leaves = chosen(folder, source.mesh, step)
    if leaves is None:
        return None
    with leaves:
        return _from(leaves, source, params, buffers, fresh, data)


def _from(
    leaves: Leaves, source: Source, params: Any, buffers: dict[str, Tensor] | None, fresh: tuple[str, ...], data: Any
) -> Restored:
    mesh, manifest, where = source.mesh, leaves.manifest, leaves.folder / "manifest.json"
    if params is None:
        params = empty_params(manifest.leaves, fresh)
    state = source.start(params, buffers)
    if fresh and source.needs_params:  # what starts anew starts from the parameters and buffers of the checkpoint

        def read_params() -> tuple[Any, Any]:
            found = source.snapshot(state)
            with decoding(where):
                values = Load(leaves, mesh, found, fresh).values
                return filled("params", params, values), buffers and filled("buffers", buffers, values)

        state = source.start(*on_each(mesh, "the parameters of a checkpoint", read_params))

    def read() -> tuple[Callable[[], Any], Callable[[], None], Any]:
        found = source.snapshot(state)
        with decoding(where):
            load = Load(leaves, mesh, found, fresh)
            own, values = load.own(), load.values
            place = position_of(values, own, data)
            return source.load(state, values, own), place, put_together(manifest.extra, values, plain=True)

    take, place, extra = on_each(mesh, "the values of a checkpoint", read)  # nothing has changed yet
    loaded = on_each(mesh, "the end of a load", lambda: (take(), place())[0])
    spec = source.about()["spec"]
    differs = manifest.spec != spec and not fresh
    note = f"the checkpoint is of {manifest.spec}, and this run of {spec}; its values are taken" if differs else ""
    return Restored(loaded, manifest.run, manifest.step, extra, note)
