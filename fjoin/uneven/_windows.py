"""The batches of an accumulation window, loaded while the window before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..loading._look_ahead import LookAhead
from ..loading._position import END, Position

Weighed = tuple[Any, float]  # a batch and its weight


class Windows:
    """Loads a rank's batches in windows of one length. Where the input ends, a window is shorter, and those after it are empty.

    Args:
        position: The position in the loader.
        weigh: `batch -> weight`.
        length: The number of batches of a window.
    """

    def __init__(self, position: Position[Any], weigh: Callable[[Any], float], length: int) -> None:
        self._position, self._weigh, self._length = position, weigh, length
        self._look_ahead, self._ended = LookAhead(), False

    def first(self) -> list[Weighed]:
        """The window that the loop begins with."""
        window = list[Weighed]()
        self._add(window, self._load(self._position.begin))
        self.fill(window, [], self._length)
        return window

    def fill(self, window: list[Weighed], held: list[Weighed], least: int) -> None:
        """Load batches into a window until it has at least `least` or the input has ended.

        Raises:
            JoinError: the loader has written into the memory of a batch of `held`, or of the window.
        """
        while len(window) < least and not self._ended:
            batches = [batch for batch, _ in (*held, *window)]
            self._add(window, self._look_ahead(batches, lambda: self._load(self._position.load)))

    def _load(self, load: Callable[[], Any]) -> Weighed:
        batch = load()
        return batch, 0.0 if batch is END else self._weigh(batch)

    def _add(self, window: list[Weighed], loaded: Weighed) -> None:
        self._ended = loaded[0] is END
        if not self._ended:
            window.append(loaded)
