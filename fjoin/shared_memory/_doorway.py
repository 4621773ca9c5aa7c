"""Connecting to the ranks of this host."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping

from .._errors import CollectiveTimeout
from . import _hosts

_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_GREETING_S = 5.0  # a rank greets at once
_STRANGERS = 64  # connections that have not greeted yet
_LOOK_S, _AGAIN_S = 0.25, 0.01


class Doorway:
    """A socket at which other processes of this host reach this one, by an address without a file.

    Any process of the host can connect to it. A connection counts once the system says that it comes from this user, and
    a greeting has shown that it knows the secret, which ranks exchange through their store.

    Attributes:
        host: Names this host: the same in two processes that can share memory and sockets. A process that cannot has a name
            of its own.
        address: The socket's name, and the secret.
    """

    def __init__(self) -> None:
        name = secrets.token_hex(16)
        self._secret = secrets.token_hex(16)
        self.address = f"{name} {self._secret}"
        self._socket: socket.socket | None = None
        if _hosts.can_share():
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                self._socket.bind(f"\0fjoin-{name}")
                self._socket.listen(4096)
        self.host = _hosts.host_name() if self._socket is not None else name

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
        """Accept the connections of the missing ranks. No connection is waited for by itself."""
        strangers: dict[int, tuple[socket.socket, float]] = {}  # by descriptor; until when they may greet
        door, poll = self._socket, select.poll()
        assert door is not None
        poll.register(door, select.POLLIN)
        try:
            looks = time.monotonic() + _LOOK_S
            while missing:
                ready = [fd for fd, _ in poll.poll(_LOOK_S * 1e3)]
                now = time.monotonic()
                for fd in ready:
                    if fd in strangers and (other := self._greeted_by(strangers[fd][0])) is not None:
                        poll.unregister(fd)
                        connection, _ = strangers.pop(fd)
                        if other in missing:
                            found[other] = connection
                            missing.discard(other)
                        else:
                            connection.close()
                silent = [fd for fd, (_, until) in strangers.items() if now > until]
                for fd in [*silent, *list(strangers)[: max(0, len(strangers) - _STRANGERS)]]:
                    if fd in strangers:
                        poll.unregister(fd)
                        strangers.pop(fd)[0].close()
                if door.fileno() in ready:
                    connection = door.accept()[0]
                    if _user_of(connection) == os.geteuid():
                        connection.setblocking(False)
                        strangers[connection.fileno()] = connection, now + _GREETING_S
                        poll.register(connection, select.POLLIN)
                    else:
                        connection.close()
                if now >= looks:
                    check()
                    looks = now + _LOOK_S
                if now >= end and missing:
                    raise TimeoutError
        finally:
            for connection, _ in strangers.values():
                connection.close()

    def _greeted_by(self, connection: socket.socket) -> int | None:
        """The rank that has greeted; -1 for a process that is no rank of this run, and None where nothing has come."""
        try:
            data = connection.recv(_RANK.size + len(self._secret) + 1)
        except BlockingIOError:
            return None
        except OSError:
            return -1
        known = hmac.compare_digest(data[_RANK.size :], self._secret.encode())
        return int(_RANK.unpack_from(data)[0]) if known else -1


def _reach(address: str, rank: int, end: float, check: Callable[[], None]) -> socket.socket:
    """A connection to the doorway of another rank, which has been greeted."""
    name, secret = address.split(" ")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                connection.connect(f"\0fjoin-{name}")
                break
            except BlockingIOError:  # too many connections have not been accepted yet
                check()
                if time.monotonic() >= end:
                    raise TimeoutError from None
                time.sleep(_AGAIN_S)
        if _user_of(connection) != os.geteuid():
            raise PermissionError("another user's process has the address of a rank")
        connection.send(_RANK.pack(rank) + secret.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
