"""Packets between two ranks of a host."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CollectiveTimeout, PeerLost
from ._memory import HostRegion, map_of_peer

# Parts of at most this size travel in the packet itself.
INLINE_BYTES = 64 * 1024
MEMORY, PART, INLINE, TAKEN, DROPPED = range(5)
# Kind, axis, fingerprint of the call, message; region, its size, first byte, bytes: of the part for this rank; a
# number.
_HEAD = struct.Struct("<BBxxIQQQQQd")
ROOM = 2 * INLINE_BYTES + _HEAD.size
_RIGHTS = socket.CMSG_SPACE(4)
# Errors of a connection whose other end is closed. All others are this process's own.
_CLOSED = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNREFUSED, errno.EBADF}


class PeerGone(PeerLost):
    """A rank has closed its connection, or has ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of this host has closed its connection", rank=rank)


class Late(CollectiveTimeout):
    """A message has timed out."""


class PacketPart(NamedTuple):
    """A rank's announcement: its part of a message."""

    fingerprint: int
    values: Tensor
    shared: bool


class Head(NamedTuple):
    """The fixed part of a packet."""

    kind: int
    axis: int = 0
    fingerprint: int = 0
    message: int = 0
    region: int = 0
    size: int = 0
    first: int = 0
    nbytes: int = 0
    number: float = 0.0


class Peer:
    """The connection to another rank of this host, and its memory."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.memory = -1  # the descriptor of the other process's memory, once that has arrived
        self.regions: dict[int, HostRegion] = {}  # of the other process
        self.parts: dict[tuple[int, int], PacketPart] = {}  # by axis and message
        self.taken: dict[tuple[int, int], float] = {}  # messages whose part from this process it has taken
        self.waiting: deque[bytes] = deque()  # packets that did not fit into the connection
        self.deaf = False  # it takes no more packets, but some of its own may still be unread
        self.ended = False

    def send(self, head: Head, data: Any = b"", fd: int | None = None) -> None:
        """Send a packet, now or once the connection has room.

        Raises:
            OSError: the system refuses to send it, for another reason than that the peer has gone.
        """
        if self.ended or self.deaf:
            return
        if self.waiting or not self._fits([_HEAD.pack(*head), data], fd):
            if fd is not None:
                raise OSError(errno.EAGAIN, "a connection has no room for its first packet")
            self.waiting.append(_HEAD.pack(*head) + bytes(data))

    def flush(self) -> None:
        """Send the waiting packets that fit."""
        while self.waiting and (self.deaf or self._fits([self.waiting[0]])):
            self.waiting.popleft()

    def _fits(self, parts: list[Any], fd: int | None = None) -> bool:
        try:
            send(self.connection, parts, fd)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            self.deaf = True
        return True

    def read(self, room: bytearray) -> bool:
        """Read a packet, by way of `room`.

        Returns:
            Whether there was one.

        Raises:
            OSError: the system refuses a descriptor or memory.
        """
        try:
            size, rights, _, _ = self.connection.recvmsg_into([room], _RIGHTS, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            size, rights = 0, []
        if not size:
            self.ended = True
            return False
        head = Head(*_HEAD.unpack_from(room))
        key = head.axis, head.message
        if head.kind == TAKEN:
            self.taken[key] = head.number
        elif head.kind == DROPPED:
            self.regions.pop(head.region, None)
        elif head.kind == INLINE:
            data = room[_HEAD.size : size]
            values = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            self.parts[key] = PacketPart(head.fingerprint, values, False)
        elif head.kind == MEMORY:
            if not rights:
                raise OSError(errno.EMFILE, "no descriptor is left for the memory of another rank")
            self.memory = struct.unpack("i", rights[0][2][:4])[0]
        else:
            if head.region not in self.regions:
                self.regions[head.region] = map_of_peer(self.memory, head.region, head.size)
            values = self.regions[head.region].bytes[head.first : head.first + head.nbytes]
            self.parts[key] = PacketPart(head.fingerprint, values, True)
        return True

    def close(self) -> None:
        self.ended = True
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1
        self.parts.clear()
        self.regions.clear()
        self.connection.close()


def send(connection: socket.socket, parts: list[Any], fd: int | None = None) -> None:
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
    connection.sendmsg(parts, rights, socket.MSG_DONTWAIT)


def poll_of(peers: Iterable[Peer]) -> select.poll:
    """A poll that ends when a packet arrives, or there is room for one that waits."""
    poll = select.poll()
    for peer in peers:
        if not peer.ended:
            poll.register(peer.connection, select.POLLIN | select.POLLOUT if peer.waiting else select.POLLIN)
    return poll
