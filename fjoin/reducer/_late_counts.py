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
        check: `(step, sums, late)`, raises where not all ranks have called the same step.
    """

    def __init__(
        self, ends: tuple[Transform, ...], sizes: Mapping[str, int], check: Callable[[int, dict[str, Any], int], None]
    ) -> None:
        self._ends, self._sizes, self._check = ends, sizes, check
        self._late: tuple[int, Callable[[], dict[str, Any]]] | None = None  # the step of the counts, and they

    def take(self, step: int) -> list[CountsOfAll]:
        """The counts of an earlier step, mostly the one before, where they have not been read yet.

        They are checked here, before this rank waits for messages that other ranks may not send.
        """
        late, self._late = self._late, None
        if late is None:
            return []
        of, sums = late[0], late[1]()
        counts = CountsOfAll(step - of + 1, sums)
        self._check(step, sums, counts.late)
        return [counts]

    def clear(self) -> None:
        """Wait for counts that have not been read yet, and discard them."""
        late, self._late = self._late, None
        if late is not None:
            late[1]()

    def read(self, step: int, now: Callable[[], dict[str, Any]]) -> list[CountsOfAll]:
        """The counts to look at in this step.

        Args:
            now: Waits for the counts of this step.
        """
        counts = self.take(step)
        if any(axes_of(part, self._sizes, step, at_end=True) for part in self._ends):
            return [*counts, CountsOfAll(1, now())]  # before the ranks change each other's values
        self._late = step, now
        return counts
