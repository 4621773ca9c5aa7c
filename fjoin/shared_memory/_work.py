"""Collectives of the backend "fjoin" that are under way."""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._exchange import Exchange

Started = tuple[Exchange, Callable[[], object]]


class SharedWork(dist.Work):
    """Messages under way.

    Attributes:
        source: The rank that has sent, for recv_anysource.
    """

    def __init__(self, started: Sequence[Started], result: Any, waiter: Waiter) -> None:
        super().__init__()
        self._started, self._result, self._waiter = list(started), result, waiter
        self._lock = threading.Lock()
        self._future: Any = None
        self.source = -1

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for all messages.

        Args:
            timeout: 0 for the time-out of the group. After a shorter one the messages are still under way.
        """
        limit = timeout.total_seconds()
        end = time.monotonic() + limit if limit > 0 else None
        while (first := self._first()) is not None:
            first.wait(None if end is None else max(end - time.monotonic(), 0.0))
            self._end(first)
        return True

    def _first(self) -> Exchange | None:
        with self._lock:
            return self._started[0][0] if self._started else None

    def _end(self, exchange: Exchange) -> None:
        """Give the results of a message that has come; another thread may do so too."""
        with self._lock:
            if self._started and self._started[0][0] is exchange:
                self._started[0][1]()
                self._started.pop(0)

    def is_completed(self) -> bool:
        """Whether the results are there, or `wait` would raise."""
        while (first := self._first()) is not None and first.arrived():
            if not first.is_done():
                return True
            self._end(first)
        return first is None

    def is_success(self) -> bool:
        return self.is_completed() and self._first() is None

    def result(self) -> Any:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> Any:
        """A future of the result. A thread of the group completes it."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._waiter.add(self)
        return self._future

    def complete(self) -> None:
        """Wait, and set the future."""
        try:
            self.wait()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)


class Waiter:
    """A thread that waits for works one after the other; it starts with the first one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[SharedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: SharedWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_complete, args=(self._queue,), name="fjoin group", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def stop(self) -> None:
        self._queue.put(None)


def _complete(works: queue.SimpleQueue[SharedWork | None]) -> None:
    while (work := works.get()) is not None:
        work.complete()
        del work
