"""Which rank writes which values: each value is written once."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from ...transforms.axes.simulator._grid import Grid
from ...transforms.tree._placement import Placement
from ..values._snapshot import Snapshot, bytes_of


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
            size = 0 if place.cut else bytes_of(value)
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
        raise ValueError(
            f"the value {name!r} is cut over {place.cut!r}, but belongs to no parameter; it cannot be saved"
        )
    if not own.holds:
        return None
    whole = own.whole or not value.dim() or value.numel() != own.stop - own.start
    return (tuple(value.shape), None) if whole else (tuple(own.shape), own.start)
