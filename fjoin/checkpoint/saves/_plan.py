"""What a rank writes in the saves of values of one form, and which values it compares with other ranks."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._errors import CheckpointError
from ...agreement._replicas import apart
from ...groups._mesh import Mesh
from ...transforms.tree._placement import Placement
from ..values._snapshot import Snapshot, is_host
from ._copies import kinds_of
from ._writers import Writers


class Written:
    """What one rank writes.

    Args:
        names: Name in the file -> name of the value.
        leaves: For each name in the file, the leaf of the manifest that it is a part of, and what is known of it.
    """

    def __init__(self, names: dict[str, str], leaves: dict[str, tuple[str, dict[str, Any]]]) -> None:
        self.names, self._leaves, self._shown = names, leaves, ("", "")
        self._kinds: dict[torch.dtype | None, list[str]] | None = None

    def kinds(self, tensors: Mapping[str, Tensor]) -> Mapping[torch.dtype | None, list[str]]:
        """Of the tensors of the first save, for copies."""
        self._kinds = self._kinds or kinds_of(tensors)
        return self._kinds

    def leaves(self, tensors: Mapping[str, Tensor]) -> str:
        """The leaves of the manifest, as JSON. Of slices the shape is that of the whole."""
        shapes = str([(value.dtype, *value.shape) for value in tensors.values()])
        if shapes != self._shown[0]:
            found = {}
            for name, value in tensors.items():
                path, leaf = self._leaves[name]
                leaf["dtype"] = str(value.dtype).removeprefix("torch.")
                found[path] = leaf if leaf["part"][2] is not None else leaf | {"shape": list(value.shape)}
            self._shown = shapes, json.dumps(found)
        return self._shown[1]


class Plan:
    """Names and placements are the same in most saves; what follows from them is computed once.

    Args:
        axes: The mesh.
        rank: This rank.
        found: A snapshot of the form.
    """

    def __init__(self, axes: Mapping[str, int], rank: int, found: Snapshot) -> None:
        self._axes, self._rank, self._form = dict(axes), rank, found.form
        self._written: dict[bool, Written] = {}
        group = functools.cache(Writers(axes, rank).group)
        # Name -> a text that the ranks have in common which should have equal values.
        self.groups = {name: f"{group(p.equal)} {p.equal}" for name, p in found.places.items() if p.equal}
        self.numbers = [name for name, value in found.values.items() if is_host(value)]
        # Name -> dtype and shape, of values that all ranks have.
        self._forms = {
            name: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            for name, value in found.values.items()
            if name not in found.by_content and not found.places[name].cut
        }
        self._digest = zlib.crc32(repr(self._forms).encode())
        self.shared = [name for name in self.numbers if set(found.places[name].equal) == set(axes)]

    def fits(self, found: Snapshot) -> bool:
        """Whether it is the plan of these values too."""
        return self._form == found.form

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
        names, leaves = {}, {}
        for path, place in Writers(self._axes, self._rank, spread).mine(found):
            names[place.name] = path
            alone = (
                path in found.by_content and place.rank is not None
            )  # other ranks may have another form, or no such value
            leaves[place.name] = (
                place.name if alone else path,
                {
                    "shape": list(place.shape),
                    "placement": _shown(found.places[path]) | ({"of": path, "rank": place.rank} if alone else {}),
                    "part": [place.name, None if alone else place.rank, place.start],
                },
            )
        return Written(names, leaves)


def _shown(place: Placement) -> dict[str, Any]:
    return {"equal": list(place.equal), "cut": place.cut, "merge": place.merge.value}
