"""Finding the ranks of this host, and connecting to them."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import CollectiveTimeout

_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group


class Doorway:
    """A socket at which other processes of this host reach this one, by an address without a file.

    Attributes:
        host: Names this host: the same in two processes that can share memory and sockets. A process that cannot has a name
            of its own.
        address: The socket's name.
    """

    def __init__(self) -> None:
        self.address = secrets.token_hex(16)
        self._socket: Any = None
        if can_share():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind(f"\0fjoin-{self.address}")
            self._socket.listen(4096)
        self.host = host_name() if self._socket is not None else self.address

    def __enter__(self) -> Doorway:
        return self

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def connect(self, rank: int, addresses: Mapping[int, str], timeout_s: float) -> dict[int, socket.socket]:
        """Connect to other ranks of this host, which all do the same.

        Args:
            rank: This rank.
            addresses: Rank -> the address of its doorway.
            timeout_s: The limit, in seconds.

        Raises:
            CollectiveTimeout: a rank has not come in time.
        """
        end, found = time.monotonic() + timeout_s, dict[int, socket.socket]()
        missing = set(addresses)
        try:
            for other in sorted(missing):
                if other < rank:
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    found[other] = connection
                    connection.settimeout(max(end - time.monotonic(), 1e-3))
                    connection.connect(f"\0fjoin-{addresses[other]}")
                    connection.send(_RANK.pack(rank))
                    missing.discard(other)
            while missing:
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                connection = self._socket.accept()[0]
                connection.settimeout(max(end - time.monotonic(), 1e-3))
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                data = connection.recv(_RANK.size)
                other = _RANK.unpack(data)[0] if len(data) == _RANK.size else -1
                if _CREDENTIALS.unpack(credentials)[1] != os.getuid() or other not in missing:
                    connection.close()  # no rank of this run
                    continue
                found[other] = connection
                missing.discard(other)
        except OSError as error:
            for connection in found.values():
                connection.close()
            raise CollectiveTimeout(
                f"rank {rank} could not connect to rank {min(missing)}, which is on the same host, within {timeout_s:g} s: {error}",
                rank=min(missing),
            ) from None
        for connection in found.values():
            connection.setblocking(False)
        return found


@functools.cache
def can_share() -> bool:
    """Whether this process can share memory and sockets without a name: on Linux, unless a sandbox forbids it."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.eventfd(0))
        fd = os.memfd_create("fjoin")
        try:
            os.posix_fallocate(fd, 0, 1)
        finally:
            os.close(fd)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"\0fjoin-{secrets.token_hex(16)}")
    except OSError:
        return False
    return True


def host_name() -> str:
    """A name for this host, with the network namespace of this process."""
    parts = []
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts) or socket.gethostname()


def split_by_host(ranks: Sequence[int], hosts: Mapping[int, str]) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each host, and those with the same place in their hosts; nothing where that is of no use.

    Args:
        hosts: Rank -> host; empty where it does not matter.
    """
    by: dict[str, list[int]] = {}
    for rank in ranks if hosts else ():
        by.setdefault(hosts[rank], []).append(rank)
    inside = list(by.values())
    if len(inside) < 2 or len(inside[0]) < 2 or len({len(part) for part in inside}) > 1:
        return [], []
    return inside, [list(part) for part in zip(*inside, strict=True)]
