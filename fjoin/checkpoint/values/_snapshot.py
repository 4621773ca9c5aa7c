"""What a rank has of a run: values by name, and their placements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...transforms.layout._pieces import Pieces
from ...transforms.tree._placement import Placement
from ._names import Names


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
        pieces: The pieces of a pipeline that shards; None for others.
        form: Equal for snapshots whose names and placements are.
        rank: What only this rank has, as JSON.
        extra: What the user keeps beside it, as JSON; its tensors are among the values.
        by_content: Whether values that differ are no drift, but placed where they differ.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Placement] = field(default_factory=dict)
    pieces: Pieces | None = None
    form: list[Any] = field(default_factory=list)
    rank: dict[str, Any] = field(default_factory=dict)
    by_content: bool = False
    extra: Any = None

    def add_extra(self, extra: Any, tensors: Mapping[str, Tensor], axes: Iterable[str]) -> None:
        """Add what the user keeps, which is the same on all ranks, and its tensors."""
        self.extra = extra
        self.values |= tensors
        self.places |= dict.fromkeys(tensors, Placement(tuple(axes)))
        self.form.append(list(tensors))

    def add(self, prefix: str, values: Mapping[str, Any], place: Placement) -> None:
        """Add values under a prefix, all of one placement."""
        self.values |= {f"{prefix}.{name}": value for name, value in values.items()}
        self.places |= {f"{prefix}.{name}": place for name in values}
        self.form += [prefix, list(values), place]

    def add_state(self, names: Names, state: Any) -> None:
        """Add the leaves of a state."""
        self.values |= names.values(state)
        self.places |= names.places
        self.form.append(names.structure)

    def leaf_of(self, name: str) -> str | None:
        """The path of the parameter that a slice belongs to."""
        assert self.pieces is not None
        part, _, rest = name.removeprefix("pipeline.").removeprefix("inner.").partition(".")
        return next((path for path in _inside(rest, part) if path in self.pieces.shapes), None)


def _inside(name: str, part: str) -> Iterator[str]:
    """Where a path may stand in the name of a value of a pipeline's part, longest first.

    The optimizer's state is the tree of the parameters; states of transforms end with dicts by path.
    """
    words = name.split(".")
    for length in range(len(words), 0, -1):
        starts = range(len(words) - length + 1)
        for start in (
            starts[:1] if part == "optimizer" else starts[-1:] if part in ("hook", "after", "gather") else starts
        ):
            yield ".".join(words[start : start + length])


def is_host(value: Any) -> bool:
    """Whether a value is a number of the host, which is kept in the manifest."""
    return not isinstance(value, Tensor)


def bytes_of(value: Tensor) -> int:
    return value.numel() * value.element_size()
