"""Connecting to the ranks of this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping

from .._errors import CollectiveTimeout
from ._hosts import can_share, host_name

_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_LOOK_S, _AGAIN_S = 0.25, 0.01


class Doorway:
    """A socket at which other processes of this host reach this one, by an address without a file.

    Any process of the host can connect to it. A connection counts where the system says that it comes from this user.

    Attributes:
        host: Names this host: the same in two processes that can share memory and sockets. A process that cannot has a name
            of its own.
        address: The socket's name, which ranks exchange through their store.
    """

    def __init__(self) -> None:
        self.address = name = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        if can_share():
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                self._socket.bind(f"\0fjoin-{name}")
                self._socket.listen(4096)
        self.host = host_name() if self._socket is not None else name

    def __enter__(self) -> Doorway:
        return self

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def connect(
        self,
        rank: int,
        addresses: Mapping[int, str],
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, socket.socket]:
        """Connect to other ranks of this host, which all do the same.

        Args:
            rank: This rank.
            addresses: Rank -> the address of its doorway.
            timeout_s: The limit, in seconds.
            check: Raises where another rank cannot connect; called at intervals.

        Raises:
            CollectiveTimeout: a rank has not come in time.
            OSError: the system refuses a connection.
        """
        end, found = time.monotonic() + timeout_s, dict[int, socket.socket]()
        try:
            for other in sorted(addresses):
                if other < rank:
                    found[other] = _reach(addresses[other], rank, end, check)
            self._accept(set(addresses) - set(found), found, end, check)
        except BaseException as error:
            for connection in found.values():
                connection.close()
            if not isinstance(error, TimeoutError):
                raise
            late = min(set(addresses) - set(found))
            raise CollectiveTimeout(
                f"rank {rank} could not connect to rank {late}, which is on the same host, within {timeout_s:g} s",
                rank=late,
            ) from None
        return found

    def _accept(
        self, missing: set[int], found: dict[int, socket.socket], end: float, check: Callable[[], None]
    ) -> None:
        """Accept the connections of the missing ranks."""
        door = self._socket
        assert door is not None
        door.settimeout(_LOOK_S)
        while missing:
            try:
                connection = door.accept()[0]
            except TimeoutError:
                check()
            else:
                other = _greeted_by(connection, end)
                if other in missing:
                    found[other] = connection
                    missing.discard(other)
                else:
                    connection.close()
            if missing and time.monotonic() >= end:
                raise TimeoutError


def _greeted_by(connection: socket.socket, end: float) -> int:
    """The rank that has greeted; -1 for a process that is no rank of this user."""
    if _user_of(connection) == os.geteuid():
        connection.settimeout(max(end - time.monotonic(), _AGAIN_S))
        with contextlib.suppress(OSError):
            data = connection.recv(_RANK.size)
            connection.setblocking(False)
            return int(_RANK.unpack(data)[0]) if len(data) == _RANK.size else -1
    return -1


def _reach(address: str, rank: int, end: float, check: Callable[[], None]) -> socket.socket:
    """A connection to the doorway of another rank, which has been greeted."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                connection.connect(f"\0fjoin-{address}")
                break
            except BlockingIOError:  # too many connections have not been accepted yet
                check()
                if time.monotonic() >= end:
                    raise TimeoutError from None
                time.sleep(_AGAIN_S)
        if _user_of(connection) != os.geteuid():
            raise PermissionError("another user's process has the address of a rank")
        connection.send(_RANK.pack(rank))
    except BaseException:
        connection.close()
        raise
    return connection


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
