"""The processes of the other ranks, as far as the connections to them show.

Read from /proc, on Linux; elsewhere no connection is found and no rank is seen to have gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_OPEN = "/proc/self/fd"
_ESTABLISHED = 1  # a state of TCP


class _Socket(NamedTuple):
    fd: int
    inode: int  # a descriptor is a number that another file may have later


class Peers:
    """The TCP connections of this process at the time when this is made.

    `know` finds those that lead to a rank: a connection has the same two ends in both processes.
    """

    def __init__(self) -> None:
        self._by_ends: dict[str, _Socket] = {}
        for fd in os.listdir(_OPEN) if os.path.isdir(_OPEN) else ():
            with _opened(int(fd)) as connection:
                if connection is not None and (ends := _ends(connection)) is not None:
                    self._by_ends[" ".join(ends)] = _Socket(int(fd), os.fstat(connection.fileno()).st_ino)
        self._to: defaultdict[int, list[_Socket]] = defaultdict(list)

    def addresses(self) -> list[str]:
        """The ends of these connections, as the process at the other end writes them."""
        return [" ".join(reversed(ends.split(" "))) for ends in self._by_ends]

    def know(self, rank: int, addresses: list[str]) -> None:
        """Find the connections to a rank, given its `addresses`."""
        self._to[rank] = [self._by_ends[ends] for ends in addresses if ends in self._by_ends]

    def known(self, rank: int) -> bool:
        return rank in self._to

    def gone(self) -> list[int]:
        """The ranks to which there were connections of which none is left."""
        return [rank for rank, sockets in self._to.items() if sockets and not any(map(_is_open, sockets))]


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[socket.socket | None]:
    """A connected socket through a descriptor of its own; None where `fd` is none."""
    connection = None
    with contextlib.suppress(OSError):  # closed meanwhile, or not a socket
        if os.readlink(f"{_OPEN}/{fd}").startswith("socket:"):
            connection = socket.socket(fileno=os.dup(fd))
    try:
        yield connection
    finally:
        if connection is not None:
            connection.close()


def _is_open(found: _Socket) -> bool:
    with _opened(found.fd) as connection:
        if connection is None or os.fstat(connection.fileno()).st_ino != found.inode:
            return False
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _ends(connection: socket.socket) -> tuple[str, str] | None:
    """The addresses of this end and of the other one; None where they are not those of IP."""
    try:
        names = connection.getsockname(), connection.getpeername()
    except OSError:  # it listens, or its peer has gone
        return None
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    here, there = (f"{name[0].removeprefix('::ffff:')}:{name[1]}" for name in names)
    return here, there
