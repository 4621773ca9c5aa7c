"""Which rank writes what."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._errors import CheckpointError
from ..agreement import Replicas, form
from ..groups import Communicator
from ..transforms.axes import Grid
from ..transforms.base import Placement
from ._safetensors import check_form
from ._values import Snapshot


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

    def __init__(self, axes: Mapping[str, int], rank: int, spread: bool) -> None:
        self._axes, self._rank, self._spread = set(axes), rank, spread
        self._load: dict[tuple[str, ...], list[int]] = {}  # along these axes, what each rank has written so far
        grid = Grid(axes)
        # The ranks that have the value of this rank, of leaves that are equal over these axes.
        self.group = functools.cache(lambda equal: grid.members(rank, equal))

    def _next(self, equal: tuple[str, ...], size: int) -> int:
        """Of the ranks that have this rank's value, the one that has written least so far."""
        group = self.group(equal)
        load = self._load.setdefault(equal, [0] * len(group))
        chosen = load.index(min(load))
        load[chosen] += size if self._spread else 0
        return group[chosen]

    def mine(self, found: Snapshot) -> Iterator[tuple[str, Place]]:
        """(name, place) of the values that this rank writes. All ranks iterate over the same names."""
        for name, value in found.values.items():
            if not isinstance(value, Tensor):
                continue
            place = found.places[name]
            part = _cut_part(found, name, value, place) if place.cut else (tuple(value.shape), None)
            writes = self._next(place.equal, 0 if place.cut else value.nbytes) == self._rank
            if part is None or not writes:
                continue
            shape, start = part
            rank = self.group(place.equal)[0] if self._axes - {*place.equal, place.cut} else None
            suffix = ("" if start is None else f"@{start}") + ("" if rank is None else f"@rank-{rank}")
            yield name, Place(name + suffix, shape, rank, start)


def _cut_part(found: Snapshot, name: str, value: Tensor, place: Placement) -> tuple[tuple[int, ...], int | None] | None:
    """The shape of the whole and the start of this rank's slice; None where it holds nothing."""
    own = found.slice_of(name)
    if own is None:
        raise ValueError(f"{name!r} is cut over {place.cut!r}, but belongs to no parameter; it cannot be saved")
    if not own.holds:
        return None
    whole = own.whole or not value.dim() or value.numel() != own.stop - own.start
    return (tuple(value.shape), None) if whole else (tuple(own.shape), own.start)


class Plan:
    """What this rank writes of values, and compares; computed once for values of the same names, placements and shapes.

    Args:
        axes: The mesh.
        rank: This rank.
        found: A snapshot of the form.
        spread: Whether values that several ranks have are spread over their files.

    Attributes:
        names: Name in the file -> name of the value.
        leaves: The leaves of the manifest that these are parts of, as JSON.
        numbers, shared: The names of the values that are no tensors, and of those of them that all ranks have.
        replicas: Compares the values that ranks should have in common.

    Raises:
        TypeError, ValueError: a value that cannot be written.
    """

    def __init__(self, axes: Mapping[str, int], rank: int, found: Snapshot, spread: bool = True) -> None:
        self._form, self._shapes = found.form, _shapes(found)
        tensors = {name: value for name, value in found.values.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            check_form(name, value)
        writers, forms = Writers(axes, rank, spread), {name: form(value) for name, value in tensors.items()}
        # Name -> a text that the ranks have in common which should have equal values.
        groups = {name: f"{writers.group(p.equal)[0]} {p.equal}" for name, p in found.places.items() if p.equal}
        self.replicas = Replicas(groups, forms)
        self.numbers = [name for name in found.values if name not in tensors]
        self.shared = [name for name in self.numbers if set(found.places[name].equal) == set(axes)]
        # Name -> dtype and shape, of values that all ranks have.
        self._forms = {
            name: forms.get(name) or type(value).__name__
            for name, value in found.values.items()
            if name not in found.by_content and not found.places[name].cut
        }
        self._digest = zlib.crc32(repr(self._forms).encode())
        self.names, leaves = dict[str, str](), dict[str, Any]()
        for path, place in writers.mine(found):
            if place.name in self.names:
                both = f"{self.names[place.name]!r} and {path!r}"
                raise ValueError(f"{both} are both called {place.name!r} in the file; rename one")
            self.names[place.name] = path
            # Of these, other ranks may have another form, or none.
            alone = path in found.by_content and place.rank is not None
            equal, cut, merge = found.places[path]
            shown = {"equal": list(equal), "cut": cut, "merge": merge.value}
            leaves[place.name if alone else path] = {
                "shape": list(place.shape),
                "dtype": str(tensors[path].dtype).removeprefix("torch."),
                "placement": shown | ({"of": path, "rank": place.rank} if alone else {}),
                "part": [place.name, None if alone else place.rank, place.start],
            }
        self.leaves = json.dumps(leaves)

    def fits(self, found: Snapshot) -> bool:
        """Whether it is the plan of these values too."""
        return self._form == found.form and self._shapes == _shapes(found)

    def refuse_other_forms(self, mesh: Communicator) -> None:
        """Raise CheckpointError on all ranks where they have values of other names or forms."""
        if len(set(mesh.exchange("the form of the values", self._digest, list))) == 1:
            return
        pairs = Replicas(dict.fromkeys(self._forms, "all"), {}).apart(mesh, "the forms that differ", self._forms)
        name, (rank, other) = min(pairs.items()) if pairs else ("their order", (mesh.rank, 0))
        what = f"{name} of rank {rank} is another than on rank {other}, here it is {self._forms.get(name, 'not there')}"
        remedy = "all ranks must save the same pipeline and parameters"
        raise CheckpointError(f"the ranks have values of other names or forms: {what}; {remedy}", rank=rank)


def _shapes(found: Snapshot) -> list[Any]:
    """The dtypes and shapes of tensors, and the types of numbers."""
    return [(one.dtype, one.shape) if isinstance(one, Tensor) else type(one) for one in found.values.values()]


def drifted(mesh: Communicator, plan: Plan, values: Mapping[str, Any]) -> dict[str, str]:
    """Name -> a line, for each value that is not equal where its placement says so."""
    pairs = plan.replicas.apart(mesh, "a comparison of replicas", values)
    return {name: f"{name} of rank {rank} differs from that of rank {other}" for name, (rank, other) in pairs.items()}
