"""The links of a rank to the others of its host, and exchanges of tensors over them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from .._errors import DesyncError, JoinError, TransportError, closed
from ..transforms.base import devices
from ._memory import HostMemory, HostRegion
from ._packets import DROPPED, INLINE, INLINE_BYTES, MEMORY, PART, ROOM, TAKEN, Head, Late, Peer, PeerGone, poll_of

_NOTHING = torch.empty(0)


@dataclass(eq=False)
class Exchange:
    """A message in which every rank gives each other rank a part.

    Attributes:
        links: The connections.
        key: The number of the axis, and that of the message on it.
        source: This rank's values, 1-d and contiguous.
        given: Rank -> the range of `source` that it gets.
        fingerprint: Of the call; it must be the same on all ranks.
        take: Gets rank -> its part, of `source`'s dtype, and copies what it needs. It may return a number, which
            travels with the answer that the part has been taken. None once the parts have been taken.
        failing: Raises where a rank has failed; called at intervals of a wait.
        waiting: A context in which the host waits.
        pushes: Whether `take` writes into the parts, for their ranks. Then `source` holds their results once all others
            have taken theirs.
        settles: Whether a wait also waits until all others have taken their parts, so that `source` may be written
            into. It does where others read `source` itself, and not a copy.
        inline: Whether small parts may travel in the packets, which are not answered.
        numbers: That of this rank's `take` first, and those of all ranks that have answered.
        from_memory: The ranks whose part was not in a packet: they get an answer.
    """

    links: HostLinks
    key: tuple[int, int]
    source: Tensor
    given: dict[int, tuple[int, int]]
    fingerprint: int
    take: Callable[[dict[int, Tensor]], float | None] | None
    failing: Callable[[], None]
    waiting: AbstractContextManager[None]
    pushes: bool = False
    settles: bool = False
    inline: bool = True
    is_settled: bool = False
    untaken: set[int] = field(default_factory=set)
    from_memory: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    failed: Exception | None = None
    _copy: HostRegion | None = None
    _result: Tensor | None = None

    def __post_init__(self) -> None:
        self.settles, self.inline = self.settles or self.pushes, self.inline and not self.pushes

    def place(self, memory: HostMemory) -> tuple[int, int, int]:
        """Where other ranks can read `source`, or a copy of it: a region, its size, and the first byte in it."""
        lazy = self.source.is_conj() or self.source.is_neg()  # its memory does not hold its values
        found = None if lazy else memory.find(self.source)
        if found is not None:
            self.settles = True
            return found
        nbytes = self.source.numel() * self.source.element_size()
        self._copy = memory.borrow(nbytes)
        staged = self._copy.bytes[:nbytes].view(self.source.dtype)
        staged.copy_(self.source)
        self._result, self.source = self.source, staged
        return self._copy.first, self._copy.size, 0

    def try_take(self) -> bool:
        """Take the parts, if all are here.

        An error is kept for this message's `wait`, whichever thread takes the parts.
        """
        peers, take = self.links.peers, self.take
        if take is None or not all(self.key in peers[rank].parts for rank in self.given):
            return False
        packets = {rank: peers[rank].parts.pop(self.key) for rank in self.given}
        self.take = None  # it may refer to this object
        odd = [rank for rank, packet in packets.items() if packet.fingerprint != self.fingerprint]
        if odd:
            other = "another collective, or with another size, shape, dtype, root or pairs"
            text = f"rank {odd[0]} of this host has called {other}; run the same program on all ranks"
            self.failed = DesyncError(text)
            return True
        self.from_memory = [rank for rank, packet in packets.items() if packet.shared]
        try:
            number = take({rank: one.values.view(self.source.dtype) for rank, one in packets.items()})
            self.numbers.insert(0, number or 0.0)
        except Exception as error:
            self.failed = error
            self.numbers.insert(0, 0.0)
        return True

    def settle(self) -> bool:
        """Whether all other ranks have taken their parts, so that `source` may be overwritten."""
        for rank in list(self.untaken):
            value = self.links.peers[rank].taken.pop(self.key, None)
            if value is not None:
                self.numbers.append(value)
                self.untaken.discard(rank)
        if self.untaken or self.take is not None:
            return False
        if self._copy is not None:
            if self.pushes and self._result is not None:
                self._result.copy_(self.source)
            self.links.memory.give_back(self._copy)
            self._copy = self._result = None
        self.source, self.is_settled = _NOTHING, True
        return True

    @property
    def total(self) -> float:
        """The sum of all numbers: the same on all ranks once all have answered."""
        return sum(sorted(self.numbers))  # in one order on all ranks

    def arrived(self) -> bool:
        """Whether a wait would not wait."""
        self.links.progress()
        return self.is_done() or self.links.lost(self.needed())

    def is_done(self) -> bool:
        # What waits for room leaves only while this rank waits too, and another rank may need it to go on.
        sent = all(self.links.peers[rank].ended or not self.links.peers[rank].waiting for rank in self.given)
        return self.failed is not None or (self.take is None and sent and (not self.settles or self.is_settled))

    @devices.uncompiled
    def wait(self) -> None:
        """Wait for the parts, until this rank's own have left, and where `settles` until all have taken theirs."""
        with self.waiting:
            self.links.wait(self.is_done, self.needed, self.failing)
        if self.failed is not None:
            raise self.failed

    def needed(self) -> list[int]:
        """The ranks that a wait would wait for."""
        peers = self.links.peers
        if self.take is not None:
            return [rank for rank in self.given if self.key not in peers[rank].parts]
        return list(self.untaken)


def announce(exchange: Exchange, peers: Mapping[int, Peer], memory: HostMemory) -> None:
    """Announce this rank's parts of a message to the ranks that they are for, and send small ones at once."""
    drops = [memory.dropped.popleft() for _ in range(len(memory.dropped))]
    place: tuple[int, int, int] | None = None
    for rank, (start, stop) in exchange.given.items():
        peer, part = peers[rank], exchange.source[start:stop]
        for dropped in drops:
            peer.send(Head(DROPPED, region=dropped))
        head = exchange.key[0], exchange.fingerprint, exchange.key[1]
        nbytes = part.numel() * part.element_size()
        if nbytes <= INLINE_BYTES and exchange.inline:
            data = part.resolve_conj().resolve_neg().view(torch.uint8).numpy() if nbytes else b""
            peer.send(Head(INLINE, *head, nbytes=nbytes), data)
            continue
        if place is None:
            place = exchange.place(memory)
        region, size, first = place
        first += start * part.element_size()
        peer.send(Head(PART, *head, region, size, first, nbytes))
        exchange.untaken.add(rank)


LOOK_S = 0.25  # the time between two checks for failures while a message is awaited


class HostLinks:
    """The connections of one rank to the other ranks of its host.

    Args:
        connections: By rank.
        timeout_s: Seconds after which a message fails.
    """

    def __init__(self, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.peers = {rank: Peer(connection) for rank, connection in connections.items()}
        self._under_way: list[Exchange] = []
        self._room = bytearray(ROOM)
        self._lock = threading.RLock()
        self._moved, self._reads = threading.Condition(self._lock), False  # whether a thread sleeps until packets come
        self.closed, self._failure = False, ""
        self.report: Callable[[TransportError], object] = lambda error: None
        self.memory = HostMemory()
        self.memory.give_back(self.memory.borrow(1))  # a limit shows here, and in a packet as large as any
        for i, peer in enumerate(self.peers.values()):
            peer.send(Head(MEMORY), b"" if i else bytes(2 * INLINE_BYTES), self.memory.fd)
        _OPEN.add(self)

    def absent(self) -> list[int]:
        """The ranks whose memory has not arrived."""
        return [rank for rank, peer in self.peers.items() if peer.memory < 0]

    def reach(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks, this one included, are on this host."""
        return len(set(ranks) - set(self.peers)) == 1

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros whose messages need no copy."""
        return self._made(self.memory.zeros, numel, dtype)

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary values whose messages need no copy."""
        return self._made(self.memory.lend, numel, dtype)

    def _made(self, make: Callable[[int, torch.dtype], Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return make(numel, dtype)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        """Close the connections, so that the other ranks notice that this one cannot go on."""
        refused = "the system refuses shared memory, or a message to another rank of this host"
        remedy = "raise the limit, or use gloo with fjoin.mesh(..., transport='gloo') or FJOIN_TRANSPORT=gloo"
        failure = TransportError(f"{refused}: {error}; {remedy}")
        self.report(failure)
        self.close()
        raise failure from error

    # -- sending -----------------------------------------------------------------------------------

    def start(self, exchange: Exchange) -> None:
        """Announce this rank's parts of a message, and take those that are here already."""
        with self._lock:
            self._open()
            try:
                announce(exchange, self.peers, self.memory)
                self._under_way.append(exchange)
                self._move()
            except OSError as error:
                self._fail(error)

    # -- receiving ---------------------------------------------------------------------------------

    def _move(self) -> None:
        """Read all packets that have arrived, send those that wait, and take the parts of messages that are complete.

        A thread that sleeps wakes when packets come. No other one reads them, or it would sleep on.
        """
        for peer in self.peers.values():
            peer.flush()
            while not self._reads and not peer.ended and peer.read(self._room):
                pass
        for exchange in self._under_way:
            if exchange.try_take():
                axis, message = exchange.key
                for rank in exchange.from_memory:
                    self.peers[rank].send(Head(TAKEN, axis, message=message, number=exchange.numbers[0]))
        self._under_way = [exchange for exchange in self._under_way if not exchange.settle()]

    # -- waiting -----------------------------------------------------------------------------------

    def progress(self) -> None:
        """Do what can be done without waiting."""
        with self._lock:
            if not self.closed:
                self._move_or_fail()

    def _move_or_fail(self) -> None:
        try:
            self._move()
        except OSError as error:
            self._fail(error)

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
        end, looks = now + limit_s, now + LOOK_S
        while True:
            with self._lock:
                if self.closed and done():  # a message that had come before
                    return
                self._open()
                self._move_or_fail()
                if done():
                    return
                gone = [rank for rank in needed() if self.peers[rank].ended]
                if gone:
                    raise PeerGone(gone[0])
                if now >= end:
                    raise Late(f"Operation timed out: a message between ranks of this host, after {limit_s:g} s")
                pause = min(looks, end) - now
                if self._reads:
                    self._moved.wait(pause)
                else:
                    self._sleep(pause)
            now = time.monotonic()
            if now >= looks:
                check()
                now = time.monotonic()
                looks = now + LOOK_S

    def _sleep(self, seconds: float) -> None:
        """Sleep until a packet comes; without the lock, so that other threads may start messages."""
        poll = poll_of(self.peers.values())
        self._reads = True
        self._lock.release()
        try:
            poll.poll(seconds * 1e3)
        finally:
            self._lock.acquire()
            self._reads = False
            self._moved.notify_all()

    def settle(self, limit_s: float, failed: Sequence[int] = ()) -> None:
        """Wait, before this rank closes its connections, for all messages under way that no lost rank is needed for.

        Ranks that have `failed` are lost too, though their processes live on.

        Messages move only while their ranks wait, and the other ranks come to wait for each message that this one has
        begun. Without this wait they would lose what it has given them, such as gathered parameters.
        """

        def done() -> bool:
            needed = [exchange.needed() for exchange in self._under_way if exchange.failed is None]
            return all(self.lost(ranks) or not set(failed).isdisjoint(ranks) for ranks in needed)

        with contextlib.suppress(PeerGone, Late, JoinError):
            self.wait(done, lambda: (), lambda: None, limit_s)

    def _open(self) -> None:
        if self.closed:
            raise closed(self._failure)

    def close(self, failure: str = "") -> None:
        """End the connections, for this process and all that it has forked, after a failure if one is given in words."""
        with self._lock:
            self.closed, self._failure = True, failure
            self.memory.close()  # first: other ranks may still read what is freed from here on
            for peer in self.peers.values():
                with contextlib.suppress(OSError):
                    peer.connection.shutdown(socket.SHUT_RDWR)
                peer.close()
            self._under_way.clear()
            self._moved.notify_all()


_OPEN: weakref.WeakSet[HostLinks] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked process: close its descriptors, so that the others notice when the rank itself ends."""
    for links in list(_OPEN):
        for peer in links.peers.values():
            peer.close()
        links.closed = True


os.register_at_fork(after_in_child=_after_fork)
