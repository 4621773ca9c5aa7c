"""Which rank writes what, and the copies that it writes from."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import call, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..agreement import Replicas, form
from ..groups import Communicator
from ..transforms.axes import Grid
from ..transforms.base import Placement
from ._safetensors import check_form
from ._values import Snapshot

_SMALL = 1 << 16  # elements; a larger one has memory of its own, which is freed once it is written


class Kind(NamedTuple):
    """How a tensor is copied."""

    dtype: torch.dtype | None  # of small ones, which are copied into one tensor
    stays: bool  # until all copies have been made, so that another thread can copy it


def kinds_of(tensors: Mapping[str, Tensor], stay: Collection[str]) -> dict[Kind, list[str]]:
    """The names of tensors by their kind.

    Args:
        stay: The names of those that stay as they are until all copies have been made.
    """
    found: dict[Kind, list[str]] = {}
    for name, value in tensors.items():
        small = value.dim() and value.numel() <= _SMALL
        stays = name in stay and value.device.type == "cpu"  # on a device, other threads have other streams
        found.setdefault(Kind(value.dtype if small else None, stays), []).append(name)
    return found


class Copies:
    """Copies of tensors, on the CPU: of those that do not stay at once, of others by `tensors`, in another thread.

    Attributes:
        done: Set once nothing is left to be copied.
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], kinds: Mapping[Kind, Sequence[str]]) -> None:
        self._tensors, self.done = tensors, threading.Event()
        self._alone, self._small = dict[str, Tensor](), list[_Small]()
        self._later = {kind: names for kind, names in kinds.items() if kind.stays}
        for kind, names in kinds.items():
            if not kind.stays:
                self._copy(kind, names)

    def _copy(self, kind: Kind, names: Sequence[str]) -> None:
        some = [*map(self._tensors.__getitem__, names)]
        if kind.dtype is not None:
            shapes = [value.shape for value in some]
            self._small.append(_Small(names, shapes, torch.cat([value.reshape(-1) for value in some]).cpu()))
            return
        once: dict[int, Tensor] = {}  # such as a count of steps that all parameters share
        for name, value in zip(names, some, strict=True):
            if id(value) not in once:
                once[id(value)] = value.to("cpu", copy=True)
            self._alone[name] = once[id(value)]

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The copies by name, all of them made. Views are made here, and not while the run waits."""
        try:
            for kind, names in self._later.items():
                self._copy(kind, names)
        finally:
            order = self._tensors.keys()
            self.release()
        found = self._alone
        for names, shapes, flat in self._small:
            parts = flat.split([shape.numel() for shape in shapes])
            found |= {name: part.view(shape) for name, shape, part in zip(names, shapes, parts, strict=True)}
        self._small, self._alone = [], {}
        return {name: found[name] for name in order}

    def release(self) -> None:
        """End the wait; what has not been copied is given up."""
        self._later, self._tensors = {}, {}
        self.done.set()


class _Small(NamedTuple):
    """Small tensors of one dtype in one."""

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    flat: Tensor


class Place(NamedTuple):
    """A part of a leaf in a rank's file."""

    name: str  # in the file
    shape: tuple[int, ...]  # of the whole leaf
    rank: int | None  # whose value it is; None: that of all
    start: int | None  # of a slice, its first element in the flat leaf


class Writers:
    """Gives each value to one of the ranks that have it, so that files are about equally large.

    Args:
        axes: The mesh.
        rank: This rank.
        spread: Whether to spread the values over the ranks; if not, the lowest rank that has one writes it.
    """

    def __init__(self, axes: Mapping[str, int], rank: int, spread: bool = True) -> None:
        self._grid, self._rank, self._spread = Grid(axes), rank, spread
        self._load: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}

    def group(self, equal: Collection[str]) -> int:
        """The lowest rank that has the values of this rank, of leaves that are equal over these axes."""
        return self._grid.members(self._rank, equal)[0]

    def _next(self, equal: tuple[str, ...], size: int) -> int:
        """Of the ranks that have this rank's value, the one at the place along these axes that has written least so far."""
        spots = itertools.product(*(range(self._grid.sizes[name]) for name in equal))
        load = self._load.setdefault(equal, dict.fromkeys(spots, 0))
        chosen = min(load, key=lambda spot: (load[spot], spot))
        load[chosen] += size if self._spread else 0
        return self._grid.rank(self._grid.place(self._rank) | dict(zip(equal, chosen, strict=True)))

    def mine(self, found: Snapshot) -> Iterator[tuple[str, Place]]:
        """(name, place) of the values that this rank writes. All ranks iterate over the same names."""
        for name, value in found.values.items():
            if not isinstance(value, Tensor):
                continue
            place = found.places[name]
            part = _cut_part(found, name, value, place) if place.cut else (tuple(value.shape), None)
            size = 0 if place.cut else value.nbytes
            writes = self._next(place.equal, size) == self._rank
            if part is None or not writes:
                continue
            shape, start = part
            rank = None if place.cut and not self._others(place) else self.group(place.equal)
            rank = None if set(place.equal) == self._grid.sizes.keys() else rank
            suffix = ("" if start is None else f"@{start}") + ("" if rank is None else f"@rank-{rank}")
            yield name, Place(name + suffix, shape, rank, start)

    def _others(self, place: Placement) -> set[str]:
        """The axes over which ranks have other values, beside slices of one."""
        return self._grid.sizes.keys() - set(place.equal) - {place.cut or ""}


def _cut_part(found: Snapshot, name: str, value: Tensor, place: Placement) -> tuple[tuple[int, ...], int | None] | None:
    """The shape of the whole and the start of this rank's slice; None where it holds nothing."""
    own = found.slice_of(name)
    if own is None:
        raise ValueError(f"{name!r} is cut over {place.cut!r}, but belongs to no parameter; it cannot be saved")
    if not own.holds:
        return None
    whole = own.whole or not value.dim() or value.numel() != own.stop - own.start
    return (tuple(value.shape), None) if whole else (tuple(own.shape), own.start)


class Written(NamedTuple):
    """What one rank writes."""

    names: dict[str, str]  # name in the file -> name of the value
    kinds: dict[Kind, list[str]]  # of the names in the file, for copies
    leaves: str  # the leaves of the manifest that these are parts of, as JSON


class Plan:
    """Names, placements and shapes are the same in most saves; what follows from them is computed once.

    Args:
        axes: The mesh.
        rank: This rank.
        found: A snapshot of the form.

    Raises:
        TypeError: a value that cannot be written.
    """

    def __init__(self, axes: Mapping[str, int], rank: int, found: Snapshot) -> None:
        self._axes, self._rank, self._form = dict(axes), rank, found.form
        self._shapes, self._written = [*map(_shape, found.values.values())], dict[bool, Written]()
        self._objects = [*map(_reference, found.values.values())]  # most values are the same objects in each save
        for name, value in found.values.items():
            if isinstance(value, Tensor):
                check_form(name, value)
        group = functools.cache(Writers(axes, rank).group)
        # Name -> a text that the ranks have in common which should have equal values.
        groups = {name: f"{group(p.equal)} {p.equal}" for name, p in found.places.items() if p.equal}
        forms = {name: form(value) for name, value in found.values.items() if isinstance(value, Tensor)}
        self.replicas = Replicas(groups, forms)
        self.numbers = [name for name, value in found.values.items() if not isinstance(value, Tensor)]
        # Name -> dtype and shape, of values that all ranks have.
        self._forms = {
            name: forms.get(name) or type(found.values[name]).__name__
            for name in found.values
            if name not in found.by_content and not found.places[name].cut
        }
        self._digest = zlib.crc32(repr(self._forms).encode())
        self.shared = [name for name in self.numbers if set(found.places[name].equal) == set(axes)]

    def fits(self, found: Snapshot) -> bool:
        """Whether it is the plan of these values too."""
        if self._form != found.form:
            return False
        values = found.values.values()
        new = [i for i, same in enumerate(map(is_, map(call, self._objects), values)) if not same]
        held = [*values] if new else []
        if any(self._shapes[i] != _shape(held[i]) for i in new):
            return False
        for i in new:
            self._objects[i] = _reference(held[i])
        return True

    def refuse_other_forms(self, mesh: Communicator) -> None:
        """Raise CheckpointError on all ranks where they have values of other names or forms."""
        if len(set(mesh.exchange("the form of the values", self._digest, list))) == 1:
            return
        pairs = Replicas(dict.fromkeys(self._forms, "all"), {}).apart(mesh, "the forms that differ", self._forms)
        name, (rank, other) = min(pairs.items()) if pairs else ("their order", (mesh.rank, 0))
        here = self._forms.get(name, "not there")
        raise CheckpointError(
            f"the ranks have values of other names or forms: {name} of rank {rank} is another than on rank {other}, here it is {here}; all "
            f"ranks must save the same pipeline and parameters",
            rank=rank,
        )

    def written(self, found: Snapshot, spread: bool) -> Written:
        """What this rank writes of values that this plan fits.

        Args:
            spread: Whether values that several ranks have are spread over their files.
        """
        if spread not in self._written:
            self._written[spread] = self._make(found, spread)
        return self._written[spread]

    def _make(self, found: Snapshot, spread: bool) -> Written:
        names, leaves = dict[str, str](), dict[str, Any]()
        for path, place in Writers(self._axes, self._rank, spread).mine(found):
            if place.name in names:
                raise ValueError(
                    f"{names[place.name]!r} and {path!r} are both called {place.name!r} in the file; rename one"
                )
            names[place.name] = path
            # Of these, other ranks may have another form, or none.
            alone = path in found.by_content and place.rank is not None
            leaves[place.name if alone else path] = {
                "shape": list(place.shape),
                "dtype": str(found.values[path].dtype).removeprefix("torch."),
                "placement": _shown(found.places[path]) | ({"of": path, "rank": place.rank} if alone else {}),
                "part": [place.name, None if alone else place.rank, place.start],
            }
        stay = {name for name, path in names.items() if found.stays(path)}
        kinds = kinds_of({name: found.values[path] for name, path in names.items()}, stay)
        return Written(names, kinds, json.dumps(leaves))


def _shape(value: Any) -> Any:
    """The dtype and shape of a tensor, and the type of a number."""
    return (value.dtype, value.shape) if isinstance(value, Tensor) else type(value)


def _reference(value: Any) -> Callable[[], Any]:
    """A function that returns a tensor as long as it lives."""
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: None


def _shown(place: Placement) -> dict[str, Any]:
    return {"equal": list(place.equal), "cut": place.cut, "merge": place.merge.value}


def drifted(mesh: Communicator, plan: Plan, found: Snapshot) -> dict[str, str]:
    """Name -> a line, for each value that is not equal where its placement says so."""
    if mesh.size == 1:
        return {}
    pairs = plan.replicas.apart(mesh, "a comparison of replicas", found.values)
    return {name: f"{name} of rank {rank} differs from that of rank {other}" for name, (rank, other) in pairs.items()}
