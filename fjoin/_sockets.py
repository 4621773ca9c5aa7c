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


def connections(loops: Iterable[int]) -> list[socket.socket]:
    """The connections that some event loops watch, each with a descriptor of its own."""
    found = []
    for fd in (fd for loop in loops for fd in _watched(loop)):
        with contextlib.suppress(OSError):  # pipes are watched too, and a listening socket, which has no peer
            connection = socket.socket(fileno=os.dup(fd))
            try:
                connection.getpeername()
            except OSError:
                connection.close()
                continue
            found.append(connection)
    return found


def shut(found: Iterable[socket.socket]) -> None:
    """End connections in both directions, for this process and all it has forked."""
    for connection in found:
        with connection, contextlib.suppress(OSError):  # it may have ended
            connection.shutdown(socket.SHUT_RDWR)


def _watched(loop: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{loop}") as lines:
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []
