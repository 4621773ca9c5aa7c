"""What a rank writes in the saves of values of one form, and which values it compares with other ranks."""

from __future__ import annotations

import functools
import json
import weakref
import zlib
from collections.abc import Callable, Mapping
from operator import call, is_
from typing import Any, NamedTuple

from torch import Tensor

from ..._errors import CheckpointError
from ...agreement._replicas import Replicas, form
from ...groups._mesh import Mesh
from ...transforms.tree._placement import Placement
from .._safetensors import check_form
from ..values._snapshot import Snapshot
from ._copies import Kind, kinds_of
from ._writers import Writers


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

    def refuse_other_forms(self, mesh: Mesh) -> None:
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
            alone = (
                path in found.by_content and place.rank is not None
            )  # other ranks may have another form, or no such value
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
