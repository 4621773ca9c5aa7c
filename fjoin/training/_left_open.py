"""What a run leaves undone: averages that were not taken, gradients of an unfinished accumulation window."""

from __future__ import annotations

import atexit
import sys
import warnings
import weakref
from collections.abc import Sequence

from ..transforms.transform._timing import unfinished
from ..transforms.transform._transform import Transform

_OPEN: set[LeftOpen] = set()  # of the runs that have not ended
_TEXTS: list[str] = []  # of those that have; shown at the end of the program


class LeftOpen:
    """The unfinished windows of a run.

    Args:
        owner: The run; at its end, or that of the program, what it leaves undone is noted, to be shown at the end of the
            program.
        parts: The transforms of its parameters and buffers.
        remedy: The call that finishes them.

    Attributes:
        steps: The number of its steps; 0 after a flush, until the next step.
        gathers: Whether it holds gradients of an accumulation window.
        failed: Whether it has failed, so that nothing can be finished.
    """

    steps: int
    gathers: bool
    failed: bool

    def __init__(self, owner: object, parts: Sequence[Transform], remedy: str) -> None:
        self._parts, self._remedy = tuple(parts), remedy
        self.steps, self.gathers, self.failed = 0, False, False
        _OPEN.add(self)
        weakref.finalize(owner, self._note)

    def texts(self) -> list[str]:
        """What is left undone, and what to do."""
        if self.failed:
            return []
        found = []
        if self.steps and (left := [part for part in self._parts if unfinished(part, self.steps)]):
            found.append(
                f"after step {self.steps - 1} a window of {left[0]!r} is unfinished, so the ranks' values may differ; call "
                f"{self._remedy} at the end of training"
            )
        if self.gathers:
            found.append(
                "the gradients of an unfinished accumulation window are lost: the last micro-batches have had no step; loop over "
                "step.join(loader), which steps an incomplete window too, or call the step as often as accumulate= says"
            )
        return found

    def warn(self, stacklevel: int) -> None:
        """Warn of what is left undone, and count it as known."""
        texts = self.texts()
        self.steps, self.gathers = 0, False
        for text in texts:
            warnings.warn(text, stacklevel=stacklevel + 1)

    def _note(self) -> None:
        _TEXTS.extend(self.texts())
        _OPEN.discard(self)


@atexit.register
def _show() -> None:
    if not hasattr(sys, "last_type"):  # the program has not ended by an exception, which is reported already
        for text in dict.fromkeys([*_TEXTS, *(text for one in _OPEN for text in one.texts())]):
            warnings.warn(f"at the end of the program: {text}", stacklevel=1)
