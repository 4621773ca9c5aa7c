"""Limits and sandboxes: ranks use gloo where the system refuses shared memory at the start, and raise where it does later."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.shared_memory import HostChannel, HostLinks, _packets, _rendezvous as _hosts
from tests.helpers import raises_text
from tests.ranks import reports

Report = Callable[[Any], None]


def refuses(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError(errno.EPERM, "not in this sandbox")


def only_plain(connection: Any, parts: Any, fd: int | None = None) -> None:
    if fd is not None:
        refuses()
    connection.sendmsg(parts, [], socket.MSG_DONTWAIT)


def small_limit(kind: int) -> tuple[int, int]:
    return (1 << 30, 1 << 30) if kind == resource.RLIMIT_FSIZE else (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


# Where the system refuses -> what is replaced. The first ones are seen by each rank alone, the last ones while it connects.
CALLS: dict[str, tuple[Any, str, Any]] = {
    "files of any size": (resource, "getrlimit", small_limit), "a socket": (_hosts, "_new_socket", refuses),
    "memory": (os, "memfd_create", refuses), "memory's size": (os, "posix_fallocate", refuses),
    "a descriptor in a packet": (_packets, "send", only_plain),
    "the memory of another rank": (_packets.Peer, "read", refuses),
}  # fmt: skip


@contextlib.contextmanager
def refused(what: str, here: bool) -> Iterator[None]:
    """Any transport may be used, of which the system refuses a part where it does so here."""
    transport = os.environ.pop("FJOIN_TRANSPORT")
    try:
        with mock.patch.object(*CALLS[what]) if here else contextlib.nullcontext():
            yield
    finally:
        os.environ["FJOIN_TRANSPORT"] = transport


def with_a_refusal(what: str) -> Any:
    """Meshes where the system refuses rank 1."""
    with refused(what, dist.get_rank() == 1):
        mesh, text = fjoin.mesh({"data": -1}), ""
        try:
            fjoin.mesh({"data": -1}, transport="shared")
        except (ValueError, fjoin.TransportError) as error:
            text = str(error)
        with fjoin.bind(mesh):
            total = tx.psum(torch.ones(30_000), "data").sum().item()
        dist.barrier()  # a rank that drops its mesh disturbs one that still reads
        return type(mesh.axes["data"]).__name__, total, text


@pytest.mark.parametrize("what", CALLS)
def test_all_ranks_use_gloo_where_one_is_refused(pool: Any, what: str) -> None:
    start = time.monotonic()
    for kind, total, text in pool.run(3, with_a_refusal, what):
        assert (kind, total) == ("GroupAxis", 90_000.0)
        assert "transport=" in text
    assert time.monotonic() - start < 30.0  # of time-outs of 60 s


def linked(timeout_s: float = 10.0) -> tuple[HostLinks, HostLinks]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return HostLinks({1: ends[0]}, timeout_s), HostLinks({0: ends[1]}, timeout_s)


SIZES = {"in the packet": 10, "in shared memory": 100_000}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("code", ["EMSGSIZE", "ENOBUFS", "EPERM", "ETOOMANYREFS"])
def test_a_refused_packet_is_an_error_at_once_on_both_ranks(
    monkeypatch: pytest.MonkeyPatch, code: str, size: int
) -> None:
    first, second = linked()
    reported: list[BaseException] = []
    first.report = reported.append

    def send(*args: Any) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    waits = HostChannel(second, 0, [0, 1], 1).reduce_("psum", torch.ones(size))
    monkeypatch.setattr(_packets, "send", send)
    start = time.monotonic()
    with pytest.raises(fjoin.TransportError, match="transport='gloo'") as error:
        HostChannel(first, 0, [0, 1], 0).reduce_("psum", torch.ones(size))
    assert os.strerror(getattr(errno, code)) in str(error.value) and reported == [error.value]
    monkeypatch.undo()
    raises_text(fjoin.PeerLost, lambda: waits.wait(), "rank 0 of this host has closed its connection")
    assert time.monotonic() - start < 2.0
    raises_text(fjoin.JoinError, lambda: HostChannel(first, 0, [0, 1], 0).reduce_("psum", torch.ones(size)), "closed")
    second.close()


@pytest.mark.parametrize("code", ["EPIPE", "ENOTCONN"])
def test_a_closed_peer_is_no_refusal(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Data sent before the close is still read."""
    first, second = linked()
    sent = HostChannel(second, 0, [0, 1], 1).exchange("all_gather", torch.ones(5), [(0, 5)] * 2, lambda parts: None)

    def send(*args: Any) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(_packets, "send", send)
    channel, got = HostChannel(first, 0, [0, 1], 0), []
    work = channel.exchange("all_gather", torch.ones(5), [(0, 5)] * 2, lambda parts: got.append(parts[1].sum().item()))
    second.close()
    work.wait()
    assert got == [5.0]
    raises_text(fjoin.PeerLost, lambda: channel.reduce_("psum", torch.ones(5)).wait())
    first.close()
    assert not sent.is_done()


def test_a_small_socket_buffer_is_no_time_out() -> None:
    """The kernel itself refuses a packet that can never fit."""
    first, second = linked(60.0)
    first.peers[1].connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    start = time.monotonic()
    with pytest.raises(fjoin.TransportError, match="too long"):
        HostChannel(first, 0, [0, 1], 0).reduce_("psum", torch.ones(15_000))
    assert time.monotonic() - start < 2.0
    second.close()


@pytest.mark.parametrize("call", ["zeros", "lend", "exchange"])
def test_memory_that_is_refused_later(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    first, second = linked()
    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with pytest.raises(fjoin.TransportError, match="not in this sandbox"):
        if call == "exchange":
            HostChannel(first, 0, [0, 1], 0).reduce_("psum", torch.ones(100_000))
        else:
            getattr(first, call)(100_000, torch.float32)
    raises_text(fjoin.PeerLost, lambda: HostChannel(second, 0, [0, 1], 1).reduce_("psum", torch.ones(5)).wait())
    second.close()


def meets_a_limit(rank: int, report: Report) -> None:
    """Training in which rank 1's system refuses packets from some moment on."""
    params, batch = {"w": torch.zeros(50_000)}, torch.tensor(1.0)
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)),
        mesh=fjoin.mesh({"data": -1}, timeout_s=60.0, transport="shared"),
    )  # fmt: skip
    state = step.init(params)
    for i in range(3):
        if rank == 1 and i == 2:
            _packets.send = refuses
        try:
            state, _ = step(state, batch)
        except Exception as error:
            report((type(error).__name__, str(error), round(state.params["w"][0].item(), 4)))
            return


def test_a_limit_during_training_is_typed_on_all_ranks() -> None:
    for rank, (kind, text, value) in enumerate(reports(3, meets_a_limit)):
        assert kind == ("TransportError" if rank == 1 else "PeerLost"), text
        assert "not in this sandbox" in text and value == -0.2
