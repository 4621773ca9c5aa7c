"""Ranks of one host find each other; processes of other users are ignored."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import Any

import pytest

import fjoin
from fjoin.shared_memory import Doorway, _rendezvous as _hosts
from tests.helpers import raises_text

RANK = struct.Struct("<q")


def caller(doorway: Doorway, data: bytes = b"") -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(f"\0fjoin-{doorway.address}")
    if data:
        one.send(data)
    return one


def met(doors: list[Doorway], timeout_s: float = 20.0) -> list[Any]:
    """What each rank gets that connects to all others: its connections, or an error."""
    found: list[Any] = [None] * len(doors)

    def run(rank: int) -> None:
        others = {other: door.address for other, door in enumerate(doors) if other != rank}
        try:
            found[rank] = _hosts.connect(doors[rank], rank, others, timeout_s)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(range(len(doors)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_processes_of_another_user_are_ignored(pool: Any) -> None:
    with Doorway() as first, Doorway() as second:
        at, stop = os.pipe(), os.pipe()
        if (child := os.fork()) == 0:
            os.setuid(65534)
            _held = [caller(first, RANK.pack(1)) for _ in range(100)]
            os.write(at[1], b".")
            os.read(stop[0], 1)
            os._exit(0)
        os.read(at[0], 1)
        found = met([first, second])
        os.write(stop[1], b".")
        os.waitpid(child, 0)
        assert [set(one.peers) for one in found] == [{1}, {0}]
        for fd in (*at, *stop):
            os.close(fd)
        for links in found:
            links.close()


def test_connect_retries_if_the_queue_is_full() -> None:
    """The system queues a limited number of connections; a rank that comes later waits for its turn."""
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(Doorway()) for _ in range(2)]
        assert doors[0]._socket is not None
        doors[0]._socket.listen(1)
        full = 0
        while full < 10:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as one:
                try:
                    one.connect(f"\0fjoin-{doors[0].address}")
                except BlockingIOError:
                    break
            full += 1
        found = met(doors)
        assert 0 < full < 10 and [set(one.peers) for one in found] == [{1}, {0}]
        for links in found:
            links.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    with Doorway() as door, Doorway() as other, Doorway() as absent:
        found: list[Any] = []
        addresses = {1: other.address, 2: absent.address}
        call = lambda: _hosts.connect(other, 1, {0: door.address}, 5.0)  # noqa: E731
        thread = threading.Thread(
            target=lambda: found.append(raises_text(fjoin.PeerLost, call, "closed its connection"))
        )
        thread.start()
        with pytest.raises(fjoin.CollectiveTimeout, match="rank 0 could not connect to rank 2") as error:
            _hosts.connect(door, 0, addresses, 0.5)
        thread.join()
        assert found and error.value.rank == 2


def test_ranks_of_other_users_and_name_spaces_are_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _hosts.host_name("net", "user")
    assert own == _hosts.host_name("net", "user")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    other_user = _hosts.host_name("net", "user")
    monkeypatch.undo()
    monkeypatch.setattr(os, "readlink", lambda path: f"{path}:[1]")
    assert len({own, other_user, _hosts.host_name("net", "user")}) == 3
