"""Requests of single ranks, to save and to stop, that travel with the ranks that have another batch."""

from __future__ import annotations

import math

from .._errors import JoinError

# With more ranks than this the three counts of a message are not exact in float32.
_MOST_RANKS = 4096


class Requests:
    """What this rank asks of all ranks, and what the ranks have agreed on. No message grows by it.

    A rank asks at any time. The request travels once, in the next record of a step, and all ranks know it after the same
    step: after the step that sent it, or, where no rank waits for that record, after the step that follows.

    The record's scalar `has_next` holds three counts of ranks, as digits of the base ranks + 1: with another batch, that ask to
    save, that ask to stop.

    Attributes:
        saves_agreed: The number of times that a record which all ranks have read asked to save.
        stop_agreed: Whether such a record asked to stop; `begin` resets it.

    Args:
        ranks: The number of ranks whose records are summed.
    """

    saves_agreed: int
    stop_agreed: bool

    def __init__(self, ranks: int) -> None:
        self._ranks, self._digit = ranks, float(ranks + 1)
        self._asked = set[str]()
        self.saves_agreed, self.stop_agreed = 0, False

    def ask_save(self) -> None:
        """Ask all ranks to save after one of the next steps. A signal handler may call it."""
        self._ask("save")

    def ask_stop(self) -> None:
        """Ask all ranks to stop after one of the next steps. A signal handler may call it."""
        self._ask("stop")

    def ask_end_of_loop(self) -> None:
        """As `ask_stop`, for the loop that runs: `end` withdraws a request that has not travelled."""
        self._ask("loop")

    def _ask(self, what: str) -> None:
        if self._ranks > _MOST_RANKS:
            raise JoinError(f"a request to {what} travels between at most {_MOST_RANKS} ranks; here are {self._ranks}")
        self._asked.add(what)

    def begin(self) -> None:
        """A loop begins: what an earlier one has agreed on does not stop it."""
        self.stop_agreed = False

    def end(self) -> None:
        """A loop has ended."""
        self._asked.discard("loop")

    def write(self, has_next: bool) -> float:
        """The scalar `has_next` of this rank's next record, with the requests that have not travelled yet."""
        if not self._asked:
            return float(has_next)
        asked, self._asked = self._asked, set()
        return has_next + self._digit * ("save" in asked) + self._digit**2 * bool(asked & {"stop", "loop"})

    def note(self, *sums: float) -> None:
        """Take the requests of all ranks from sums of `has_next`, which all ranks read after the same step."""
        asked = [has_next // self._digit for has_next in sums if has_next >= self._digit and math.isfinite(has_next)]
        self.saves_agreed += any(save_and_stop % self._digit > 0 for save_and_stop in asked)
        self.stop_agreed |= any(save_and_stop >= self._digit for save_and_stop in asked)

    def with_next(self, has_next: float) -> float:
        """The number of ranks with another batch, from the sum of `has_next`."""
        return has_next % self._digit
