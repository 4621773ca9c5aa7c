"""Connections between the ranks of one host: packets that announce data in shared memory, or carry small ones."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._errors import JoinError
from ._exchange import Exchange
from ._memory import HostMemory, Region

# Kind, axis, fingerprint of the call, message; region, first byte, bytes: of the part for this rank; a number.
_PACKET = struct.Struct("<BBxxIQQQQd")
_PART, _INLINE, _TAKEN, _DROPPED = range(4)
# Parts of at most this size travel in the packet itself.
INLINE_BYTES = 64 * 1024
_LOOK_S = 1.0  # the time between two checks for failures while a message is awaited
_ROOM = 2 * INLINE_BYTES + _PACKET.size


class PeerGone(RuntimeError):
    """A rank has closed its connection, or has ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of this host has closed its connection")
        self.rank = rank


class Late(RuntimeError):
    """A message has timed out."""


class Packet:
    """What a rank has announced: its part of a message."""

    def __init__(self, fingerprint: int, part: Tensor, shared: bool) -> None:
        self.fingerprint, self.part, self.shared = fingerprint, part, shared


class Peer:
    """The connection to another rank of this host, and its memory."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.regions: dict[int, Region] = {}  # of the other process
        self.knows: set[int] = set()  # regions of this process that the other one has mapped
        self.parts: dict[tuple[int, int], Packet] = {}  # by axis and message
        self.taken: dict[tuple[int, int], float] = {}  # messages whose part from this process it has taken
        self.waiting: deque[tuple[bytes, int | None]] = deque()  # packets that did not fit into the connection
        self.deaf = False  # it takes no more packets, but some of its own may still be unread
        self.ended = False


class HostLinks:
    """The connections of one rank to the other ranks of its host.

    Args:
        connections: By rank.
        timeout_s: Seconds after which a message fails.

    Attributes:
        count: The number of messages so far.
    """

    def __init__(self, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self.memory, self.timeout_s = HostMemory(), timeout_s
        self.peers = {rank: Peer(connection) for rank, connection in connections.items()}
        self._by_fd = {peer.connection.fileno(): peer for peer in self.peers.values()}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self._under_way: list[Exchange] = []
        self._room = bytearray(_ROOM)
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._reader = False  # whether a thread sleeps until a packet arrives
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.POLLIN)
        self.closed, self.count = False, 0
        _OPEN.add(self)

    def reach(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks, this one included, are on this host."""
        return len(set(ranks) - set(self.peers)) == 1

    # -- sending -----------------------------------------------------------------------------------

    def start(self, exchange: Exchange) -> None:
        """Announce this rank's parts of a message, and take those that are here already."""
        with self._lock:
            self._announce(exchange)
            self._under_way.append(exchange)
            self.count += 1
            self._receive()
            self._advance()

    def _announce(self, exchange: Exchange) -> None:
        drops, self.memory.dropped = self.memory.dropped, []
        place: tuple[int, int, int] | None = None
        for rank, (start, stop) in exchange.given.items():
            peer, part = self.peers[rank], exchange.source[start:stop]
            for number in drops:
                if number in peer.knows:
                    peer.knows.discard(number)
                    self._send(peer, _PACKET.pack(_DROPPED, 0, 0, 0, number, 0, 0, 0.0))
            head = exchange.key[0], exchange.fingerprint, exchange.key[1]
            nbytes = part.numel() * part.element_size()
            if nbytes <= INLINE_BYTES and exchange.inline:
                data = part.resolve_conj().resolve_neg().view(torch.uint8).numpy() if nbytes else b""
                self._send(peer, _PACKET.pack(_INLINE, *head, 0, 0, nbytes, 0.0), data)
                continue
            if place is None:
                place = exchange.place(self.memory)
            number, fd, first = place
            new = number not in peer.knows
            peer.knows.add(number)
            first += start * part.element_size()
            self._send(peer, _PACKET.pack(_PART, *head, number, first, nbytes, 0.0), fd=fd if new else None)
            exchange.untaken.add(rank)

    def _send(self, peer: Peer, head: bytes, data: Any = b"", fd: int | None = None) -> None:
        if peer.ended or peer.deaf:
            return
        if peer.waiting:
            peer.waiting.append((head + bytes(data), None if fd is None else os.dup(fd)))
            return
        try:
            _sendmsg(peer.connection, [head, data], fd)
        except BlockingIOError:
            peer.waiting.append((head + bytes(data), None if fd is None else os.dup(fd)))
        except OSError:
            peer.deaf = True

    def _flush(self, peer: Peer) -> None:
        while peer.waiting:
            head, fd = peer.waiting[0]
            try:
                if not peer.deaf:
                    _sendmsg(peer.connection, [head], fd)
            except BlockingIOError:
                return
            except OSError:
                peer.deaf = True
            peer.waiting.popleft()
            if fd is not None:
                os.close(fd)

    # -- receiving ---------------------------------------------------------------------------------

    def _receive(self, ranks: Iterable[Peer] | None = None) -> None:
        """Read all packets that have arrived."""
        for peer in self.peers.values() if ranks is None else ranks:
            if peer.waiting:
                self._flush(peer)
            while not peer.ended and self._read(peer):
                pass

    def _read(self, peer: Peer) -> bool:
        try:
            size, ancillary, _, _ = peer.connection.recvmsg_into([self._room], _ANCILLARY, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            size, ancillary = 0, []
        if not size:
            peer.ended = True
            with contextlib.suppress(KeyError):
                self._poll.unregister(peer.connection.fileno())
            return False
        kind, axis, fingerprint, message, number, first, nbytes, value = _PACKET.unpack_from(self._room)
        if kind == _TAKEN:
            peer.taken[axis, message] = value
        elif kind == _DROPPED:
            peer.regions.pop(number, None)
        elif kind == _INLINE:
            data = self._room[_PACKET.size : size]
            part = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            peer.parts[axis, message] = Packet(fingerprint, part, False)
        else:
            if number not in peer.regions:
                fd = _descriptor(ancillary)
                try:
                    peer.regions[number] = Region(number, fd, os.fstat(fd).st_size)
                finally:
                    os.close(fd)
            part = peer.regions[number].bytes[first : first + nbytes]
            peer.parts[axis, message] = Packet(fingerprint, part, True)
        return True

    def _advance(self) -> None:
        """Take the parts of all messages that are complete."""
        before = len(self._under_way)
        moved = False
        for exchange in self._under_way:
            if not exchange.taken and exchange.try_take():
                moved = True
                axis, message = exchange.key
                for rank in exchange.from_memory:
                    self._send(self.peers[rank], _PACKET.pack(_TAKEN, axis, 0, message, 0, 0, 0, exchange.number))
        self._under_way = [exchange for exchange in self._under_way if not exchange.settle()]
        if self._reader and (moved or len(self._under_way) < before):
            os.eventfd_write(self._wake, 1)

    # -- waiting -----------------------------------------------------------------------------------

    def progress(self) -> None:
        """Do what can be done without waiting."""
        with self._lock:
            self._receive()
            self._advance()

    def lost(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks has ended, so that a wait for it would raise."""
        return self.closed or any(self.peers[rank].ended for rank in ranks)

    def wait(
        self,
        done: Callable[[], bool],
        needed: Callable[[], Iterable[int]],
        check: Callable[[], None],
        limit_s: float | None = None,
    ) -> None:
        """Wait until `done()`. Several threads may wait; one of them reads.

        Args:
            needed: The ranks that are awaited.
            check: Raises where a rank has failed; called at intervals.
            limit_s: Seconds; by default the time-out of the links.

        Raises:
            PeerGone: a rank that is awaited has ended.
            Late: no end within the limit.
        """
        limit_s = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        now = time.monotonic()
        end, looks = now + limit_s, now + _LOOK_S
        while True:
            with self._lock:
                self._open()
                self._receive()
                self._advance()
                if done():
                    return
                gone = [rank for rank in needed() if self.peers[rank].ended]
                if gone:
                    raise PeerGone(gone[0])
                if now >= end:
                    raise Late(f"Operation timed out: a message between ranks of this host, after {limit_s:g} s")
                pause = min(looks, end) - now
                reads = not self._reader
                if reads:
                    self._reader = True
                    self._watch()
                else:
                    self._moved.wait(pause)
            if reads:
                self._await_packets(pause)
            now = time.monotonic()
            if now >= looks:
                check()
                now = time.monotonic()
                looks = now + _LOOK_S

    def _open(self) -> None:
        if self.closed:
            raise JoinError(
                "this mesh was closed, or taken down after a failure; make another one with fjoin.mesh(...)"
            )

    def _watch(self) -> None:
        for peer in self.peers.values():
            if not peer.ended:
                events = select.POLLIN | select.POLLOUT if peer.waiting else select.POLLIN
                self._poll.register(peer.connection.fileno(), events)

    def _await_packets(self, seconds: float) -> None:
        """Sleep until a packet arrives, or another thread has read one."""
        try:
            if any(fd == self._wake for fd, _ in self._poll.poll(seconds * 1e3)):
                os.eventfd_read(self._wake)
        finally:
            with self._lock:
                self._reader = False
                self._moved.notify_all()
                if self.closed:
                    self._forget_wake()

    def close(self) -> None:
        """End the connections, for this process and all that it has forked."""
        with self._lock:
            self.closed = True
            for peer in self.peers.values():
                with contextlib.suppress(OSError):
                    peer.connection.shutdown(socket.SHUT_RDWR)
                peer.connection.close()
                peer.ended = True
                peer.parts.clear()
                peer.regions.clear()
            self._under_way.clear()
            self.memory.close()
            self._forget_wake()

    def _forget_wake(self) -> None:
        if self._wake >= 0 and not self._reader:  # otherwise the reader does it
            os.close(self._wake)
            self._wake = -1


def _sendmsg(connection: socket.socket, parts: list[Any], fd: int | None) -> None:
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
    connection.sendmsg(parts, rights, socket.MSG_DONTWAIT)


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int:
    ((_, _, data),) = ancillary
    return int(struct.unpack("i", data[:4])[0])


_ANCILLARY = socket.CMSG_SPACE(4)
_OPEN: weakref.WeakSet[HostLinks] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked process: close its descriptors, so that the others notice when the rank itself ends."""
    for links in list(_OPEN):
        for peer in links.peers.values():
            peer.connection.close()
            peer.ended = True
        links.closed = True


os.register_at_fork(after_in_child=_after_fork)
