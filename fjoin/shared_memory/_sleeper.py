"""Sleeping until a packet arrives, in one of the threads that wait for messages."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable
from typing import Any

from ._packets import Peer


class Sleeper:
    """The sleep of the threads of one rank: one of them reads packets, and the others wait for it.

    Args:
        lock: The lock of the connections. All methods but `sleep` are called with it.
        peers: The connections.
    """

    def __init__(self, lock: Any, peers: Iterable[Peer]) -> None:
        self._lock, self._moved = lock, threading.Condition(lock)
        self._peers = {peer.connection.fileno(): peer for peer in peers}
        self._poll = select.poll()
        for fd in self._peers:
            self._poll.register(fd, select.POLLIN)
        self._reads = self._closed = False
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.POLLIN)

    def enters(self, seconds: float) -> bool:
        """Whether this thread is the one to call `sleep`. Otherwise it has waited for the one that reads."""
        if self._reads:
            self._moved.wait(seconds)
            return False
        self._reads = True
        for fd, peer in list(self._peers.items()):
            if peer.ended:
                self._poll.unregister(fd)
                del self._peers[fd]
            else:
                self._poll.register(fd, select.POLLIN | select.POLLOUT if peer.waiting else select.POLLIN)
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep until a packet arrives, or another thread has read one."""
        try:
            if any(fd == self._wake for fd, _ in self._poll.poll(seconds * 1e3)):
                os.eventfd_read(self._wake)
        finally:
            with self._lock:
                self._reads = False
                self._moved.notify_all()
                if self._closed:
                    self.close()

    def wake(self) -> None:
        """Let the thread that reads look again."""
        if self._reads and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._closed = True
        if self._wake >= 0 and not self._reads:  # otherwise the reader does it
            os.close(self._wake)
            self._wake = -1
