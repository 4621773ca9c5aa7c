"""The counts of all ranks that loop together, read a step late where nothing depends on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..transforms._transform import Transform
from ..transforms.plan._plan import axes_of
from ._step_check import CountsOfAll


class LateCounts:
    """Reads the counts of steps whose hook reduces over fewer ranks than loop together.

    In a step with other messages between the ranks they are read at once. In other steps they are read in the step
    after, so that no rank waits there for another one.

    Args:
        ends: The transforms at the end of a step.
        sizes: Axis name -> number of ranks.
    """

    def __init__(self, ends: tuple[Transform, ...], sizes: Mapping[str, int]) -> None:
        self._ends, self._sizes = ends, sizes
        self._late: Callable[[], dict[str, Any]] | None = None

    def take(self) -> list[CountsOfAll]:
        """The counts of the step before, where they have not been read yet."""
        late, self._late = self._late, None
        return [] if late is None else [CountsOfAll(2, late())]

    def read(self, step: int, now: Callable[[], dict[str, Any]]) -> list[CountsOfAll]:
        """The counts to look at in this step.

        Args:
            now: Waits for the counts of this step.
        """
        counts = self.take()
        if any(axes_of(part, self._sizes, step, at_end=True) for part in self._ends):
            return [*counts, CountsOfAll(1, now())]  # before the ranks change each other's values
        self._late = now
        return counts
