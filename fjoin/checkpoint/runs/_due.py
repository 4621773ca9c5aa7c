"""The steps after which a run is saved."""

from __future__ import annotations

import time

from ...agreement._requests import Requests
from ...training.state._metrics import Metrics


class Due:
    """Decides after each step whether to save: the same on all ranks.

    Args:
        every: After steps whose number is a multiple of this.
        every_s: After this many seconds of rank 0's clock.
        requests: What the ranks have asked for in their steps, for a train_step.
        rank: This rank.
    """

    def __init__(self, every: int | None, every_s: float | None, requests: Requests | None, rank: int) -> None:
        if every_s is not None and (requests is None or not every_s > 0):
            raise ValueError(
                f"every_s must be a number of seconds above 0, for a train_step, got {every_s!r}; other loops save by every="
            )
        self._every, self._every_s, self._requests, self._rank = every, every_s, requests, rank
        self._last, self._saves, self._asks = 0.0, 0, False  # the last is whether this rank's clock has asked
        self.saved()

    def __call__(self, number: int, metrics: Metrics) -> bool:
        """Whether to save after this step."""
        if not metrics.stepped:
            return False
        if self._requests is None:
            return self._every is not None and number % self._every == 0
        if self._every_s is not None and self._rank == 0 and not self._asks:
            if time.monotonic() - self._last > self._every_s:
                self._requests.ask_save()
                self._asks = True
        asked = self._requests.saves_agreed > self._saves
        return asked or (self._every is not None and number % self._every == 0)

    def saved(self) -> None:
        """The ranks have saved: earlier requests are done, and the clock begins anew."""
        self._last, self._asks = time.monotonic(), False
        self._saves = 0 if self._requests is None else self._requests.saves_agreed
