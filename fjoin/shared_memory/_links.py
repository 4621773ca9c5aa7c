"""Connections between the ranks of one host: packets that announce data in shared memory, or carry small ones."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor

from .._errors import JoinError, TransportError, closed
from ._announce import announce
from ._exchange import Exchange
from ._memory import HostMemory
from ._packets import MEMORY, ROOM, TAKEN, Head, Late, Peer, PeerGone
from ._sleeper import Sleeper

_LOOK_S = 1.0  # the time between two checks for failures while a message is awaited


class HostLinks:
    """The connections of one rank to the other ranks of its host.

    Args:
        connections: By rank.
        timeout_s: Seconds after which a message fails.

    Attributes:
        count: The number of messages so far.
    """

    def __init__(self, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.peers = {rank: Peer(connection) for rank, connection in connections.items()}
        self._under_way: list[Exchange] = []
        self._room = bytearray(ROOM)
        self._lock = threading.RLock()
        self.closed, self.count, self._failure = False, 0, ""
        self.report: Callable[[TransportError], object] = lambda error: None
        self.memory = HostMemory()
        self.sleeper = Sleeper(self._lock, self.peers.values())
        for peer in self.peers.values():
            peer.send(Head(MEMORY), fd=self.memory.fd)
        _OPEN.add(self)

    def meet(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the memory of all other ranks has arrived."""

        def absent() -> list[int]:
            return [rank for rank, peer in self.peers.items() if peer.memory < 0]

        self.wait(lambda: not absent(), absent, check)

    def reach(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks, this one included, are on this host."""
        return len(set(ranks) - set(self.peers)) == 1

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros whose messages need no copy."""
        try:
            return self.memory.zeros(numel, dtype)
        except OSError as error:
            self._fail(error)

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary values whose messages need no copy."""
        try:
            return self.memory.lend(numel, dtype)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        """Close the connections, so that the other ranks notice that this one cannot go on."""
        failure = TransportError(
            f"the system refuses shared memory, or a message to another rank of this host: {error}; raise the limit, or use gloo "
            f"with fjoin.mesh(..., transport='gloo') or FJOIN_TRANSPORT=gloo"
        )
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
                self.count += 1
                self._move()
            except OSError as error:
                self._fail(error)

    # -- receiving ---------------------------------------------------------------------------------

    def _move(self) -> None:
        """Read all packets that have arrived, send those that wait, and take the parts of messages that are complete."""
        for peer in self.peers.values():
            peer.flush()
            while not peer.ended and peer.read(self._room):
                pass
        self._advance()

    def _advance(self) -> None:
        """Take the parts of all messages that are complete."""
        before = len(self._under_way)
        moved = False
        for exchange in self._under_way:
            if not exchange.taken and exchange.try_take():
                moved = True
                axis, message = exchange.key
                for rank in exchange.from_memory:
                    self.peers[rank].send(Head(TAKEN, axis, message=message, number=exchange.number))
        self._under_way = [exchange for exchange in self._under_way if not exchange.settle()]
        if moved or len(self._under_way) < before:
            self.sleeper.wake()

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
        end, looks = now + limit_s, now + _LOOK_S
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
                reads = self.sleeper.enters(pause)
            if reads:
                self.sleeper.sleep(pause)
            now = time.monotonic()
            if now >= looks:
                check()
                now = time.monotonic()
                looks = now + _LOOK_S

    def settle(self, limit_s: float) -> None:
        """Wait, before this rank closes its connections, for all messages under way that no lost rank is needed for.

        Messages move only while their ranks wait, and the other ranks come to wait for each message that this one has begun.
        Without this wait they would lose what it has given them, such as gathered parameters.
        """

        def done() -> bool:
            return all(exchange.failed or self.lost(exchange.needed()) for exchange in self._under_way)

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
            self.sleeper.close()


_OPEN: weakref.WeakSet[HostLinks] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked process: close its descriptors, so that the others notice when the rank itself ends."""
    for links in list(_OPEN):
        for peer in links.peers.values():
            peer.close()
        links.closed = True


os.register_at_fork(after_in_child=_after_fork)
