"""Threads that read a state's memory while a run goes on."""

from __future__ import annotations

from collections.abc import Callable


class Readers:
    """Those who still read the memory of a state, each as a function that waits until it no longer does."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], object]] = []

    def add(self, wait: Callable[[], object]) -> None:
        """Have `wait` called before the memory is written again."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Wait until nobody reads; whatever writes calls this first."""
        while self._waits:
            self._waits[-1]()  # where this is interrupted, the next one waits again
            self._waits.pop()
