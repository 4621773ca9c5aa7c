"""Collectives of the backend "fjoin" that are under way."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._exchange import Exchange
from .._links import HostLinks

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

    def ready(self) -> bool:
        """Whether `wait` would not wait, as far as packets have been read."""
        first = self._first()
        return first is None or first.ends()

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
        """A future of the result. It is complete where the work is; otherwise a thread of the group completes it."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.is_completed():
                self.complete()
            else:
                self._waiter.add(self)
        return self._future

    def complete(self) -> None:
        """Wait, and set the future, whose callbacks run here."""
        try:
            self.wait()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)


class Waiter:
    """Threads that complete the futures of works.

    One of them waits for all works at once. Before it runs callbacks, which may wait for other works, it lets another
    thread wait.
    """

    def __init__(self, links: HostLinks) -> None:
        self._links = links
        self._works = deque[tuple[SharedWork, float]]()  # with the time at which each is late
        self._turn = threading.Condition()
        self._waits = self._stopped = False
        self._idle = 0

    def add(self, work: SharedWork) -> None:
        with self._turn:
            self._works.append((work, time.monotonic() + self._links.timeout_s))
            self._call_one()
        self._links.wake()

    def _call_one(self) -> None:
        """See to it that a thread waits."""
        if self._works and not self._waits:
            if self._idle:
                self._turn.notify()
            else:
                threading.Thread(target=self._run, name="fjoin group", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._turn:
                self._idle += 1
                while self._waits or not (self._works or self._stopped):
                    self._turn.wait()
                self._idle -= 1
                if self._stopped and not self._works:
                    return
                self._waits = True
            work = self._next()
            with self._turn:
                self._waits = False
                self._call_one()
            work.complete()
            del work

    def _next(self) -> SharedWork:
        """Wait for the first work that ends, or is late."""
        first: list[tuple[SharedWork, float]] = []

        def ends() -> bool:
            now = time.monotonic()
            first[:] = [one for one in list(self._works) if one[0].ready() or now >= one[1]][:1]
            return bool(first)

        # Where the oldest work is late, or the connections are closed, its own wait raises.
        with contextlib.suppress(RuntimeError):
            self._links.wait(ends, list, lambda: None)
        found = first[0] if first else self._works[0]
        self._works.remove(found)
        return found[0]

    def stop(self) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()


class Kept:
    """The last works with small results.

    Where a program drops a work that it has passed to torch's C++ code, as DistributedDataParallel's join does, the work's
    Python half would end, and the C++ half could not be waited for.
    """

    def __init__(self) -> None:
        self._works: deque[SharedWork] = deque(maxlen=1024)

    def keep(self, work: SharedWork, tensors: Sequence[torch.Tensor]) -> None:
        if sum(x.untyped_storage().nbytes() for x in tensors) <= 16 * 1024:
            self._works.append(work)

    def clear(self) -> None:
        self._works.clear()
