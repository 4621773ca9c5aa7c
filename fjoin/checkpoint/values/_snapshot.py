"""What a rank has of a run: values by name, and their placements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...buckets._flat_params import Storage
from ...transforms.layout._pieces import Pieces
from ...transforms.tree._placement import Placement
from ._names import Names
from ._slices import Slice, Slices, slices_of


class About(NamedTuple):
    """Fields of a manifest, the same on all ranks."""

    spec: Any
    settings: dict[str, Any]


@dataclass
class Snapshot:
    """The values of one rank.

    Attributes:
        values: Name -> tensor or host number.
        places: Name -> placement.
        params: Name -> the paths of parameters that a value may belong to.
        slices: The beginning of names -> the slices of values of this name that are cut.
        form: Equal for snapshots whose names and placements are.
        rank: What only this rank has, as JSON.
        extra: What the user keeps beside it, as JSON, and its tensors, which are among the values.
        storage: What holds parameters and optimizer states, of a train_step: it can wait before it writes into them.
        held: The beginnings of the names of the values that the storage holds.
        by_content: The names of values that may differ between ranks, in form too, and are then saved for each rank.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Placement] = field(default_factory=dict)
    params: dict[str, tuple[str, ...]] = field(default_factory=dict)
    slices: dict[str, Slices] = field(default_factory=dict)
    form: list[Any] = field(default_factory=list)
    rank: dict[str, Any] = field(default_factory=dict)
    storage: Storage | None = None
    held: tuple[str, ...] = ()
    by_content: set[str] = field(default_factory=set)
    extra: tuple[Any, Mapping[str, Tensor]] = (None, {})

    def add_extra(self, extra: Any, tensors: Mapping[str, Tensor], axes: Iterable[str]) -> None:
        """Add what the user keeps, which is the same on all ranks, and its tensors."""
        self.extra = extra, tensors
        self._add(tensors, dict.fromkeys(tensors, Placement(tuple(axes))), list(tensors))

    def add(self, prefix: str, values: Mapping[str, Any], place: Placement) -> None:
        """Add values under a prefix, all of one placement."""
        named = {f"{prefix}.{name}": value for name, value in values.items()}
        self._add(named, dict.fromkeys(named, place), [*named, place])

    def add_by_content(self, values: Mapping[str, Any], axes: Iterable[str]) -> None:
        """Add values of which it is not known whether they are equal on all ranks."""
        self._add(values, dict.fromkeys(values, Placement(tuple(axes))), list(values))
        self.by_content |= values.keys()

    def add_state(self, names: Names, state: Any) -> None:
        """Add the leaves of a state."""
        self._add(names.values(state), names.places, names.structure)
        self.params |= names.params

    def _add(self, values: Mapping[str, Any], places: Mapping[str, Placement], form: Any) -> None:
        if not self.values.keys().isdisjoint(values):
            twice = min(self.values.keys() & values.keys())
            raise ValueError(f"two values of the run are called {twice!r}; give the objects other names")
        self.values |= values
        self.places |= places
        self.form.append(form)

    def stays(self, name: str) -> bool:
        """Whether a value stays as it is until the storage writes again."""
        return self.storage is not None and name.startswith(self.held)

    def cut(self, prefix: str, pieces: Pieces | None) -> None:
        """Values under a prefix may be cut into these pieces."""
        if pieces is not None:
            self.slices[prefix] = slices_of(pieces)
            self.form.append(pieces.fingerprint)

    def slice_of(self, name: str) -> Slice | None:
        """This rank's slice of a value that is cut; None where it is one of no parameter."""
        for prefix, slices in self.slices.items():
            if name.startswith(f"{prefix}."):
                return slices(name.removeprefix(f"{prefix}."), self.params.get(name, ()))
        return None


def bytes_of(value: Tensor) -> int:
    return value.numel() * value.element_size()
