"""The failures of one train_step on this rank, and what other ranks learn of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .._errors import FjoinError, JoinError, described
from ..records import Calls

if TYPE_CHECKING:
    from ._run import Run

CALLS = Calls(
    step="a step",
    differ="the ranks have called different train_steps of one mesh",
    remedy="Call them in the same order on all ranks, from one thread, or give each step its own fjoin.mesh(...)",
    flush="step.flush",
    even="Take the same number of steps on all ranks, with step.join where their inputs differ",
)


class StepFailures:
    """Reports failures to the other ranks, and keeps a step from being used after one.

    Attributes:
        broken: The failure after which the step cannot run again, if any.
        last_step: The number of the step that began last; None before the first.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._mesh = run, run.mesh
        self.broken: tuple[type[FjoinError], str] | None = None
        self.last_step: int | None = None

    def drain(self) -> None:
        """Raise for a step that changed nothing, which a device tells late; not after a failure."""
        if self.broken is None:
            self._run.step_check.drain()

    def check(self) -> None:
        """Raise if the step has failed before."""
        if self.broken is not None:
            kind, text = self.broken
            raise kind(f"this step cannot go on, it failed before: {text}")

    def _break(self, error: BaseException) -> None:
        """Make the step unusable. The error itself is not kept: its frames would keep all their objects alive."""
        self.broken = type(error) if isinstance(error, FjoinError) else JoinError, described(error)

    def raise_(self, error: BaseException) -> NoReturn:
        """Report an error to the other ranks, and raise its root cause."""
        self._run.stop()
        if self.broken is not None or self._run.ranks == 1:
            raise error
        try:
            self._mesh.raise_root_cause(error, self.last_step)
        except BaseException as cause:
            self._break(cause)
            raise

    def leave(self, text: str) -> None:
        """Leave a loop before its end; see `Communicator.leave`."""
        if self.broken is None and self._run.ranks > 1:
            failure = self._mesh.leave(text, self.last_step)
            if failure is not None:
                self._break(failure)
