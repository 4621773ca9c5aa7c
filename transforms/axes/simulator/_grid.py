"""Ranks arranged in named axes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence


class Grid:
    """The places of ranks along axes, the last one varying fastest.

    Args:
        sizes: Axis name -> number of ranks.

    >>> grid = Grid({"node": 2, "local": 3})
    >>> grid.place(4), grid.members(4, ["node"]), grid.rank({"node": 1, "local": 1})
    ({'node': 1, 'local': 1}, [1, 4], 4)
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._places = list(itertools.product(*map(range, sizes.values())))
        self._ranks = {place: rank for rank, place in enumerate(self._places)}

    def place(self, rank: int, axes: Sequence[str] | None = None) -> dict[str, int]:
        """Axis name -> place of a rank; only along some axes, in their order."""
        here = dict(zip(self.sizes, self._places[rank], strict=True))
        return here if axes is None else {name: here[name] for name in axes}

    def rank(self, place: Mapping[str, int]) -> int:
        """The rank at a place along all axes."""
        return self._ranks[tuple(place[name] for name in self.sizes)]

    def members(self, rank: int, axes: Collection[str]) -> list[int]:
        """The ranks with this rank's place along all other axes, in rank order."""
        here = self.place(rank)
        moved = itertools.product(*(range(size) if name in axes else [here[name]] for name, size in self.sizes.items()))
        return [self._ranks[place] for place in moved]
