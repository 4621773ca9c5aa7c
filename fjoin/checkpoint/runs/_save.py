"""A save: every rank writes its file, and rank 0 commits them together."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from ...transforms.tree._placement import Placement
from .._files import write_small
from .._folder import Folder
from .._manifest import Manifest
from .._parts import Leaf, Part
from .._safetensors import write_file
from ._drift import drifted
from ._snapshot import Snapshot, is_host
from ._writers import Writers

_SIDE = "rank-{:05d}.json"  # the leaves of a rank's file, until rank 0 has put them into the manifest


class Save:
    """One save, in which all ranks take part.

    Args:
        folder: The folder of the run.
        mesh: The ranks.
        run: The identifier of the run.
        about: Fields of the manifest that are the same on all ranks: spec, settings, extra.
    """

    def __init__(self, folder: Folder, mesh: Mesh, run: str, about: Mapping[str, Any]) -> None:
        self._folder, self._mesh, self._run, self._about = folder, mesh, run, about

    def __call__(self, step: int, found: Snapshot, position: Mapping[str, Any]) -> tuple[Path, str]:
        """Write a checkpoint; returns its folder, and its identifier.

        Args:
            position: What only this rank has, such as the position of its data; JSON.

        Raises:
            CheckpointError: on all ranks: one of them could not write, or the step exists. Nothing is left behind.
        """
        tmp = self._folder.path / self._first(lambda: self._folder.begin(step).name, "the start of a save")
        try:
            return self._files(tmp, step, found, position)
        except BaseException:
            if self._mesh.rank == 0:
                self._folder.discard(tmp)
            raise

    def _files(self, tmp: Path, step: int, found: Snapshot, position: Mapping[str, Any]) -> tuple[Path, str]:
        odd = drifted(self._mesh, found)
        if found.by_content:  # values of ranks by themselves
            found.places |= dict.fromkeys(odd.keys() & found.places.keys(), Placement(()))
            odd = {}
        notes = list(odd.values())
        self._agreed("the files of a save", lambda: self._write(tmp, found, position, spread=not notes))
        name, identifier = self._first(lambda: self._commit(tmp, step, notes), "the commit of a save")
        return self._folder.path / name, identifier

    def _write(self, tmp: Path, found: Snapshot, position: Mapping[str, Any], spread: bool) -> None:
        """Write this rank's file, and beside it what is in it."""
        mesh = self._mesh
        name = f"rank-{mesh.rank:05d}-of-{mesh.size:05d}.safetensors"
        places = dict(Writers(mesh.shape, mesh.rank, spread).mine(found))
        tensors = {place.name: found.values[path] for path, place in places.items()}
        entry = write_file(tmp / name, tensors, {"format": "pt"})
        leaves = {}
        for path, place in places.items():
            alone = found.by_content and place.rank is not None  # other ranks may have another form, or no such value
            leaves[place.name if alone else path] = {
                "shape": list(place.shape),
                "dtype": str(found.values[path].dtype).removeprefix("torch."),
                "placement": placement_of(found, path) | ({"of": path, "rank": place.rank} if alone else {}),
                "part": [place.name, None if alone else place.rank, place.start],
            }
        numbers = {path: value for path, value in found.values.items() if is_host(value)}
        shared = [path for path in numbers if set(found.places[path].equal) == set(mesh.shape)]
        side = {
            "file": asdict(entry),
            "leaves": leaves,
            "numbers": numbers,
            "shared": shared,
            "rank": {**found.rank, **position},
        }
        write_small(tmp / _SIDE.format(mesh.rank), json.dumps(side).encode())

    def _commit(self, tmp: Path, step: int, notes: list[str]) -> list[str]:
        manifest = Manifest(self._run, uuid.uuid4().hex, step, self._parent(), dict(self._mesh.shape), notes=notes)
        manifest.library = {"fjoin": "1", "torch": str(torch.__version__), "python": platform.python_version()}
        manifest.spec, manifest.settings = self._about.get("spec"), dict(self._about.get("settings", {}))
        manifest.extra = self._about.get("extra")
        for rank in range(self._mesh.size):
            side = tmp / _SIDE.format(rank)
            add_side(manifest, rank, json.loads(side.read_bytes()))
            side.unlink()
        return [self._folder.commit(tmp, manifest).name, manifest.id]

    def _parent(self) -> str:
        newest = self._folder.newest()
        return "" if newest is None else self._folder.read(newest)[1].id

    def _first(self, make: Callable[[], Any], occasion: str) -> Any:
        """The JSON value that rank 0 makes; its error is raised on all ranks."""
        value = _tried(make) if self._mesh.rank == 0 else None
        return _raised(self._mesh.exchange(occasion, value, lambda values: values[:1]))[0]

    def _agreed(self, occasion: str, make: Callable[[], Any]) -> list[Any]:
        """The JSON values of all ranks; an error of one is raised on all of them."""
        return _raised(self._mesh.exchange(occasion, _tried(make), list))


def placement_of(found: Snapshot, path: str) -> dict[str, Any]:
    place = found.places[path]
    return {"equal": list(place.equal), "cut": place.cut, "merge": place.merge.value}


def add_side(manifest: Manifest, rank: int, side: dict[str, Any]) -> None:
    """Put into the manifest what a rank has written."""
    from .._files import FileEntry

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


def _tried(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": make()}
    except Exception as error:  # the other ranks wait for this one
        return {"error": f"{type(error).__name__}: {error}"}


def _raised(values: list[dict[str, Any]]) -> list[Any]:
    for rank, value in enumerate(values):
        if "error" in value:
            raise CheckpointError(f"rank {rank} could not save, so nothing has been saved: {value['error']}", rank=rank)
    return [value["value"] for value in values]
