"""The steps on a mesh: their number, those under way on a device, and a lock that lets one thread at a time run one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from .._errors import JoinError
from .failures._unfinished import Unfinished


class Use:
    """The steps of this rank on a mesh. The messages of two threads would be mixed up, so one at a time runs a step.

    Attributes:
        steps: The number of steps initialised on the mesh, in the same order on all ranks.
        unfinished: The steps that the device may not have ended.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.unfinished: Unfinished = Unfinished()
        self._lock = threading.RLock()
        self._refused: JoinError | None = None

    @contextlib.contextmanager
    def alone(self, fail: Callable[[JoinError, bool], None]) -> Iterator[None]:
        """Keep other threads from running a step within the with block.

        Another thread that tries gets an error. This thread completes its step, and then its failure ends all ranks.

        Args:
            fail: Fails the step where two threads have met, given the error and whether to report it to the other
                ranks.

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
