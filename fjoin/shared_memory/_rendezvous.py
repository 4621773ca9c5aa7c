"""How the ranks of a host find each other."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping

from .._errors import CollectiveTimeout, TransportError
from ._links import HostLinks
from ._packets import INLINE_BYTES, PeerGone, send


@functools.cache
def can_share() -> bool:
    """Whether this process can share memory and sockets without a name: on Linux, unless a sandbox or a limit forbids it."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:  # it counts shared memory too
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"\0fjoin-{secrets.token_hex(16)}")
        _try_packet()
    except OSError:
        return False
    return True


def _try_packet() -> None:
    """Send a descriptor of shared memory, in a packet as large as any."""
    with contextlib.ExitStack() as opened:
        for fd in (os.eventfd(0), memory := os.memfd_create("fjoin")):
            opened.callback(os.close, fd)
        os.posix_fallocate(memory, 0, 1)
        ends = [opened.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        send(ends[0], [b"x" * 2 * INLINE_BYTES], memory)
        data, rights, _, _ = ends[1].recvmsg(3 * INLINE_BYTES, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT)
        for _, _, fds in rights:
            opened.callback(os.close, int.from_bytes(fds[:4], sys.byteorder))
        if len(data) != 2 * INLINE_BYTES or not rights:
            raise OSError("the packet has not arrived whole")


def host_name() -> str:
    """A name for this host, with the network, the user and the name spaces of this process."""
    parts = []
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    return " ".join([*(parts or [socket.gethostname()]), f"uid {os.geteuid()}"])


_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_LOOK_S, _AGAIN_S, _GREETING_S = 0.25, 0.01, 5.0


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
        connection.settimeout(max(min(end - time.monotonic(), _GREETING_S), _AGAIN_S))
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


class _Elsewhere(OSError):
    """Another rank of this host cannot connect."""


def connect(
    doorway: Doorway,
    rank: int,
    addresses: Mapping[int, str],
    timeout_s: float,
    refuse: Callable[[str], None],
    refused: Callable[[int], str | None],
) -> tuple[HostLinks | None, str]:
    """Connections to other ranks of this host, and the reason where there are none.

    Limits, such as that of descriptors, are met here and not later in a step. Ranks must compare the reasons before they use
    the connections, since another rank may have failed after this one has connected.

    Args:
        addresses: Rank -> the address of its doorway.
        refuse: Tells the other ranks the reason why this one cannot connect.
        refused: The reason of another rank, if it has called `refuse`.

    Raises:
        CollectiveTimeout: a rank has not come in time.
    """

    def check() -> None:
        for other in addresses:
            if reason := refused(other):
                raise _Elsewhere(reason)

    links, found, reason = None, dict[int, socket.socket](), "unfinished"
    try:
        found = doorway.connect(rank, addresses, timeout_s, check)
        links = HostLinks(found, timeout_s)
        links.report = lambda error: refuse(f"rank {rank}: {error}")
        links.meet(check)
        reason = ""
    except (_Elsewhere, TransportError) as error:
        reason = str(error)
    except PeerGone as error:
        reason = (refused(error.rank) if error.rank is not None else None) or str(error)
    except OSError as error:
        reason = f"rank {rank}: {error}"
        refuse(reason)
    finally:
        if reason:
            if links is not None:
                links.close()
            for connection in found.values():
                connection.close()
    return (None if reason else links), reason
