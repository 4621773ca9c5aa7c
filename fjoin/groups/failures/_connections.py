"""The TCP connections of process groups: the rank that each leads to, and whether it is still open.

They are read from /proc on Linux; on other systems none is found.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_OPEN = "/proc/self/fd"
_ESTABLISHED = 1  # a state of TCP


def event_loops() -> set[int]:
    """Descriptors of this process's epoll instances: gloo makes one per group to watch the group's connections."""
    found = set()
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile, such as the listing's own descriptor
            if os.readlink(f"{_OPEN}/{fd}") == "anon_inode:[eventpoll]":
                found.add(fd)
    return found


def _descriptors() -> list[int]:
    return [int(fd) for fd in os.listdir(_OPEN)] if os.path.isdir(_OPEN) else []


class _Socket(NamedTuple):
    fd: int
    inode: int  # identifies the socket: the number of a descriptor may later be reused for another file


class Connections:
    """The connections that some event loops watch at construction; by default all connections of this process.

    `know` finds the connections to a rank: a connection has the same two ends in both processes.
    """

    def __init__(self, loops: Iterable[int] | None = None) -> None:
        self._by_ends: dict[str, _Socket] = {}
        for fd in _descriptors() if loops is None else [fd for loop in loops for fd in _targets(loop)]:
            with _duplicate(fd) as connection:
                if connection is not None and (ends := _ends(connection)) is not None:
                    self._by_ends[" ".join(ends)] = _Socket(fd, os.fstat(connection.fileno()).st_ino)
        self._to: dict[int, list[_Socket]] = {}

    def addresses(self) -> list[str]:
        """The ends of these connections in the order in which the process at the other end writes them."""
        return [" ".join(reversed(ends.split(" "))) for ends in self._by_ends]

    def know(self, rank: int, addresses: list[str]) -> None:
        """Find the connections to a rank, given its `addresses`."""
        self._to[rank] = [self._by_ends[ends] for ends in addresses if ends in self._by_ends]

    def known(self, rank: int) -> bool:
        return rank in self._to

    def gone(self) -> set[int]:
        """The ranks whose connections, at least one each, have all ended."""
        return {rank for rank, sockets in self._to.items() if sockets and not any(map(_is_open, sockets))}

    def opened(self) -> list[socket.socket]:
        """The connections that are still open, each with a descriptor of its own."""
        found = []
        for one in self._by_ends.values():
            # os.dup, since the method `dup` of a socket would make gloo's descriptor blocking.
            with contextlib.suppress(OSError):
                if os.fstat(one.fd).st_ino == one.inode:
                    found.append(socket.socket(fileno=os.dup(one.fd)))
        return found


def shut(connections: Iterable[socket.socket]) -> None:
    """End connections in both directions, for this process and all processes that it has forked.

    Processes forked by a rank, such as the workers of a DataLoader, inherit its sockets. gloo only closes the sockets
    when a group is destroyed, and the peers do not notice this while such a process lives.
    """
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # it may have ended
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket | None]:
    """A socket through a descriptor of its own; None where `fd` is no socket."""
    connection = None
    with contextlib.suppress(OSError):  # closed meanwhile, or not a socket
        if os.readlink(f"{_OPEN}/{fd}").startswith("socket:"):
            connection = socket.socket(fileno=os.dup(fd))
    try:
        yield connection
    finally:
        if connection is not None:
            connection.close()


def _is_open(one: _Socket) -> bool:
    try:
        if os.fstat(one.fd).st_ino != one.inode:
            return False
    except OSError:  # closed
        return False
    with _duplicate(one.fd) as connection:
        if connection is None:  # this process has no descriptor left to look through
            return True
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _ends(connection: socket.socket) -> tuple[str, str] | None:
    """The addresses of this end and of the other one; None where `connection` is no established TCP connection."""
    try:
        names = connection.getsockname(), connection.getpeername()
    except OSError:  # it listens, or its peer has gone
        return None
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    here, there = (f"{name[0].removeprefix('::ffff:')}:{name[1]}" for name in names)
    return here, there


def _targets(loop: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{loop}") as lines:
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []
