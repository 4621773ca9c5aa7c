"""Errors of pure code and its interpreters; the other errors of the shell are in fjoin."""

from __future__ import annotations


class FjoinError(RuntimeError):
    """Base of the errors that name a rank and a step.

    Attributes:
        rank: The rank that is at fault, or None.
        step: The step in which the error was detected, or None.
    """

    rank: int | None
    step: int | None

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


class DesyncError(FjoinError):
    """The ranks do not run the same program: another pipeline, shape, dtype, order or parameter value."""


class CollectiveMismatch(RuntimeError):
    """Ranks of one axis did not call the same collective on the same shapes in the same order."""


class UnboundAxis(NameError):
    """A collective named an axis that is not bound."""


class DonatedState(RuntimeError):
    """A state was used again after a step had taken its memory."""
