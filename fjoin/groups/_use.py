"""One thread at a time uses a mesh: messages of two would be mixed up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from .._errors import JoinError


class Use:
    """Which steps a mesh has, and which thread of this rank runs one.

    Attributes:
        steps: The steps that have been initialised on it, in the same order on all ranks.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._lock = threading.RLock()
        self._refused: JoinError | None = None

    @contextlib.contextmanager
    def alone(self, fail: Callable[[JoinError, bool], None]) -> Iterator[None]:
        """Let no other thread run a step meanwhile.

        One that tries gets an error. This one completes its step, and then ends all ranks.

        Args:
            fail: What becomes of the step where two threads have met: given the error, and whether to let the other ranks know.

        Raises:
            JoinError: another thread runs a step.
        """
        if not self._lock.acquire(blocking=False):
            error = self._refused = JoinError(
                "two threads of this rank run steps of one mesh at the same time, so that their messages would be mixed up; "
                "run them in one thread, or give each its own fjoin.mesh(...)"
            )
            fail(error, False)
            raise error
        try:
            yield
            if self._refused is not None:
                fail(JoinError(str(self._refused)), True)
        finally:
            self._lock.release()
