"""What a rank writes in the saves of values of one form, and which values it compares with other ranks."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._errors import CheckpointError
from ...agreement._replicas import apart
from ...groups._mesh import Mesh
from ...transforms.tree._placement import Placement
from .._safetensors import check_form
from ..values._snapshot import Snapshot
from ._copies import kinds_of
from ._writers import Writers


class Written(NamedTuple):
    """What one rank writes."""

    names: dict[str, str]  # name in the file -> name of the value
    kinds: dict[torch.dtype | None, list[str]]  # of the names in the file, for copies
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
        self._shapes, self._written = _shapes(found), dict[bool, Written]()
        for name, value in found.values.items():
            if isinstance(value, Tensor):
                check_form(name, value)
        group = functools.cache(Writers(axes, rank).group)
        # Name -> a text that the ranks have in common which should have equal values.
        self.groups = {name: f"{group(p.equal)} {p.equal}" for name, p in found.places.items() if p.equal}
        self.numbers = [name for name, value in found.values.items() if not isinstance(value, Tensor)]
        # Name -> dtype and shape, of values that all ranks have.
        self._forms = {
            name: str(form)
            for name, form in zip(found.values, self._shapes, strict=True)
            if name not in found.by_content and not found.places[name].cut
        }
        self._digest = zlib.crc32(repr(self._forms).encode())
        self.shared = [name for name in self.numbers if set(found.places[name].equal) == set(axes)]

    def fits(self, found: Snapshot) -> bool:
        """Whether it is the plan of these values too."""
        return self._form == found.form and self._shapes == _shapes(found)

    def refuse_other_forms(self, mesh: Mesh) -> None:
        """Raise CheckpointError on all ranks where they have values of other names or forms."""
        if len(set(mesh.exchange("the form of the values", self._digest, list))) == 1:
            return
        pairs = apart(mesh, "the forms that differ", self._forms, dict.fromkeys(self._forms, "all"))
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
        kinds = kinds_of({name: found.values[path] for name, path in names.items()})
        return Written(names, kinds, json.dumps(leaves))


def _shapes(found: Snapshot) -> list[Any]:
    """The dtype and shape of each tensor, and the type of each number."""
    return [(v.dtype, v.shape) if isinstance(v, Tensor) else type(v) for v in found.values.values()]


def _shown(place: Placement) -> dict[str, Any]:
    return {"equal": list(place.equal), "cut": place.cut, "merge": place.merge.value}
