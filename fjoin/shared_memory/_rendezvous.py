"""How the ranks of a host find each other."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping

from .._errors import CollectiveTimeout
from ._links import HostLinks


def can_share() -> bool:
    """Whether this process may be able to share memory. `connect` finds what else a sandbox or a limit forbids."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # it counts shared memory too


def host_name(*spaces: str) -> str:
    """A name for this host and the user, with some name spaces of this process, such as "net" and "pid"."""
    parts = []
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in spaces]
    return " ".join([*(parts or [socket.gethostname()]), f"uid {os.geteuid()}"])


_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_LOOK_S, _AGAIN_S, _GREETING_S = 0.25, 0.01, 5.0


class Doorway:
    """A socket at which other processes of this host reach this one, by an address without a file.

    Any process of the host can connect to it. A connection counts where the system says that it comes from this user.

    Attributes:
        host: Names this host: the same in two processes that can share memory and sockets. A process that cannot has a
            name of its own.
        address: The socket's name, which ranks exchange through their store.
    """

    def __init__(self) -> None:
        self.address = self.host = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        if can_share():
            with contextlib.suppress(OSError):
                self._socket = _new_socket()
                self._socket.bind(f"\0fjoin-{self.address}")
                self._socket.listen(4096)
                self.host = host_name("net", "user")

    def __enter__(self) -> Doorway:
        return self

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def answer(self) -> tuple[int, socket.socket | None]:
        """The next rank that connects, -1 for a process that is no rank of this user; None if none comes now."""
        assert self._socket is not None
        self._socket.settimeout(_LOOK_S)
        try:
            connection = self._socket.accept()[0]
        except TimeoutError:
            return -1, None
        data = b""
        if _user_of(connection) == os.geteuid():
            connection.settimeout(_GREETING_S)
            with contextlib.suppress(OSError):
                data = connection.recv(_RANK.size)
        connection.setblocking(False)
        return _RANK.unpack(data)[0] if len(data) == _RANK.size else -1, connection


def _call(address: str, rank: int) -> socket.socket | None:
    """A connection to the doorway of another rank, which is told this one; None while too many wait there."""
    connection = _new_socket()
    try:
        connection.connect(f"\0fjoin-{address}")
        if _user_of(connection) != os.geteuid():
            raise PermissionError("another user's process has the address of a rank")
        connection.send(_RANK.pack(rank))
    except BaseException as error:
        connection.close()
        if not isinstance(error, BlockingIOError):
            raise
        time.sleep(_AGAIN_S)
        return None
    return connection


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def connect(
    doorway: Doorway,
    rank: int,
    addresses: Mapping[int, str],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> HostLinks:
    """Links to other ranks of this host, which all call this.

    Limits, such as that of descriptors, are met here and not later in a step.

    Args:
        addresses: Rank -> the address of its doorway.
        check: Raises where another rank cannot connect; called at intervals.

    Raises:
        CollectiveTimeout: a rank has not come in time.
        PeerGone: a rank has given up.
        OSError, TransportError: the system refuses memory, a connection or a packet.
    """
    end, found = time.monotonic() + timeout_s, dict[int, socket.socket]()
    with contextlib.ExitStack() as given_up:
        while missing := addresses.keys() - found.keys():
            other = min(missing)  # all ranks do the same: they connect to lower ranks first
            if other < rank:
                connection = _call(addresses[other], rank)
            else:
                other, connection = doorway.answer()
            if connection is not None and other in missing:
                found[other] = given_up.enter_context(connection)
                continue
            if connection is not None:
                connection.close()
            check()
            if time.monotonic() >= end:
                other = min(missing)
                both = f"rank {rank} could not connect to rank {other}, which is on the same host"
                raise CollectiveTimeout(f"{both}, within {timeout_s:g} s", rank=other)
        links = HostLinks(found, timeout_s)
        given_up.callback(links.close)
        links.wait(lambda: not links.absent(), links.absent, check)
        given_up.pop_all()
    return links
