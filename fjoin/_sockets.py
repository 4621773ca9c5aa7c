"""Shutting a gloo group's connections, whoever else has them open.

Processes forked by a rank, such as the workers of a DataLoader, inherit its sockets. So closing them, which is all that
gloo does where a group is destroyed, tells the peers nothing while such a process lives.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable

_OPEN = "/proc/self/fd"  # Linux; elsewhere nothing is found, and nothing shut


def event_loops() -> set[int]:
    """Descriptors of this process's epoll instances: gloo makes one for each group, which watches its connections."""
    found = set()
    for fd in os.listdir(_OPEN) if os.path.isdir(_OPEN) else ():
        with contextlib.suppress(OSError):  # closed meanwhile, such as the listing's own
            if os.readlink(f"{_OPEN}/{fd}") == "anon_inode:[eventpoll]":
                found.add(int(fd))
    return found


class Connections:
    """The connections that some event loops watch when this is made.

    Descriptors are numbers that others may have later, so a connection is known by its two ends.
    """

    def __init__(self, loops: Iterable[int] = ()) -> None:
        self._loops = tuple(loops)
        self._ends = set()
        for connection in self._watched():
            with connection:
                self._ends.add(_ends(connection))

    def opened(self) -> list[socket.socket]:
        """Those of them that are still open, each with a descriptor of its own."""
        found = []
        for connection in self._watched():
            if _ends(connection) in self._ends:
                found.append(connection)
            else:
                connection.close()
        return found

    def _watched(self) -> list[socket.socket]:
        found = []
        for fd in (fd for loop in self._loops for fd in _targets(loop)):
            with contextlib.suppress(OSError):  # closed meanwhile
                copy = os.dup(fd)
                try:
                    connection = socket.socket(fileno=copy)
                except OSError:  # pipes are watched too
                    os.close(copy)
                    continue
                try:
                    connection.getpeername()
                    found.append(connection)
                except OSError:  # a listening socket, which has no peer, or one whose peer is gone
                    connection.close()
        return found


def shut(connections: Iterable[socket.socket]) -> None:
    """End connections in both directions, for this process and all it has forked."""
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # it may have ended
            connection.shutdown(socket.SHUT_RDWR)


def _ends(connection: socket.socket) -> tuple[object, object]:
    try:
        return connection.getsockname(), connection.getpeername()
    except OSError:
        return None, None


def _targets(loop: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{loop}") as lines:
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []
