"""Packets between two ranks of a host, and the sleep until one comes."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CollectiveTimeout, PeerLost
from ._memory import Region, map_of_peer

# Parts of at most this size travel in the packet itself.
INLINE_BYTES = 64 * 1024
MEMORY, PART, INLINE, TAKEN, DROPPED = range(5)
# Kind, axis, fingerprint of the call, message; region, its size, first byte, bytes: of the part for this rank; a number.
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


class Part(NamedTuple):
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

    def pack(self) -> bytes:
        return _HEAD.pack(*self)


class Peer:
    """The connection to another rank of this host, and its memory."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.memory = -1  # the descriptor of the other process's memory, once that has arrived
        self.regions: dict[int, Region] = {}  # of the other process
        self.knows: set[int] = set()  # regions of this process that the other one has mapped
        self.parts: dict[tuple[int, int], Part] = {}  # by axis and message
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
        if self.waiting or not self._fits([head.pack(), data], fd):
            if fd is not None:
                raise OSError(errno.EAGAIN, "a connection has no room for its first packet")
            self.waiting.append(head.pack() + bytes(data))

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
            self.parts[key] = Part(head.fingerprint, values, False)
        elif head.kind == MEMORY:
            if not rights:
                raise OSError(errno.EMFILE, "no descriptor is left for the memory of another rank")
            self.memory = struct.unpack("i", rights[0][2][:4])[0]
        else:
            if head.region not in self.regions:
                self.regions[head.region] = map_of_peer(self.memory, head.region, head.size)
            values = self.regions[head.region].bytes[head.first : head.first + head.nbytes]
            self.parts[key] = Part(head.fingerprint, values, True)
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


class Sleeper:
    """The sleep of the threads of one rank: one of them reads packets, and the others wait for it.

    Args:
        lock: The lock of the connections. All methods but `sleep` are called with it.
        peers: The connections.
    """

    def __init__(self, lock: Any, peers: Iterable[Peer]) -> None:
        self._lock, self._moved = lock, threading.Condition(lock)
        self._peers = {peer.connection.fileno(): peer for peer in peers}
        self._poll = select.poll()
        for fd in self._peers:
            self._poll.register(fd, select.POLLIN)
        self._reads = self._closed = False
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.POLLIN)

    def enters(self, seconds: float) -> bool:
        """Whether this thread is the one to call `sleep`. Otherwise it has waited for the one that reads."""
        if self._reads:
            self._moved.wait(seconds)
            return False
        self._reads = True
        for fd, peer in list(self._peers.items()):
            if peer.ended:
                self._poll.unregister(fd)
                del self._peers[fd]
            else:
                self._poll.register(fd, select.POLLIN | select.POLLOUT if peer.waiting else select.POLLIN)
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep until a packet arrives, or another thread has read one."""
        try:
            if any(fd == self._wake for fd, _ in self._poll.poll(seconds * 1e3)):
                os.eventfd_read(self._wake)
        finally:
            with self._lock:
                self._reads = False
                self._moved.notify_all()
                if self._closed:
                    self.close()

    def wake(self) -> None:
        """Let the thread that reads look again."""
        if self._reads and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._closed = True
        if self._wake >= 0 and not self._reads:  # otherwise the reader does it
            os.close(self._wake)
            self._wake = -1
