"""What shared memory holds, and for how long."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.shared_memory import Doorway, HostChannel, HostLinks, _packets, _rendezvous as _hosts
from fjoin.shared_memory._memory import HostMemory
from tests.helpers import raises_text
from tests.ranks import reports


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [name.split(":")[0].split(" ")[0] for name in found if "memfd" in name or name.startswith("socket")]


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:fjoin" in line for line in maps)


def opened() -> Any:
    gc.collect()
    before, counts = mapped(), list[int]()  # earlier tests in this process may have left some
    for _ in range(4):
        mesh = fjoin.mesh({"data": -1}, transport="shared")
        x = mesh.zeros(100_000, torch.float32, None, ("data",))
        assert x is not None
        mesh.reduce_(x, ("data",)).wait()
        mesh.axes["data"].run("psum", torch.ones(100_000), None)
        del x
        mesh.close()
        del mesh
        gc.collect()
        counts.append(len(descriptors()))
    return counts, mapped() - before


def test_a_closed_mesh_leaves_nothing_open(pool: Any) -> None:
    for counts, more in pool.run(2, opened):
        assert counts[1:] == counts[1:2] * 3 and more <= 0


def overwritten_afterwards() -> int:
    """How many collectives gave a rank what another one wrote into its own tensor after the call had returned."""
    mesh = fjoin.mesh({"data": -1}, transport="shared")
    axis, n, wrong = mesh.axes["data"], 2 * 30_000, 0
    x = mesh.zeros(n, torch.float32, None, ("data",))  # other ranks read it where it lies
    assert x is not None
    calls: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: axis.run("all_gather", x, None).amax(),
        "pbroadcast": lambda: axis.run("pbroadcast", x, 1),
        "ppermute": lambda: axis.run("ppermute", x, ((0, 1), (1, 0))),
        "psum_scatter": lambda: axis.run("psum_scatter", x.view(2, -1), None) / 2,
        "all_to_all": lambda: axis.run("all_to_all", x.view(2, -1), None),
    }
    for call in calls.values():
        for _ in range(10):
            x.fill_(1.0)
            result = call()
            x.fill_(9.0)
            wrong += bool((result != 1.0).any())
    return wrong


def test_an_argument_may_be_overwritten_after_the_call(pool: Any) -> None:
    assert pool.run(2, overwritten_afterwards) == [0, 0]


def test_lent_memory_is_used_again_once_nothing_views_it() -> None:
    memory = HostMemory()
    first = memory.lend(50_000, torch.float64)
    view, place = first[7:9], memory.find(first)
    assert place is not None and memory.find(view) == (*place[:2], 7 * 8)
    del first
    second = memory.lend(50_000, torch.float64)
    assert memory.find(second) != place
    del view
    assert memory.find(memory.lend(50_000, torch.float64)) == place
    kept = memory.lend(10, torch.float32).fill_(3.0)
    memory.close()
    assert (kept == 3.0).all()


def test_memory_may_be_given_back_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may end tensors while memory is made or borrowed, in this thread."""
    memory, allocate = HostMemory(), os.posix_fallocate
    lent = [memory.lend(size, torch.uint8) for size in (5_000, 50_000, 500_000)]

    def collects(*args: int) -> None:
        if lent:
            del lent[-1]
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", collects)
    for size in (60_000, 70_000, 80_000, 5_000, 50_000, 500_000):
        assert memory.borrow(size).size >= size
    assert not lent


def test_a_forked_process_frees_nothing() -> None:
    """A DataLoader worker, for example, drops the tensors that it has inherited."""
    memory = HostMemory()
    held = [memory.zeros(5_000, torch.float32).fill_(3.0), memory.lend(5_000, torch.float32).fill_(4.0)]
    if (child := os.fork()) == 0:
        held.clear()
        memory.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (held[0] == 3.0).all() and (held[1] == 4.0).all()


# -- ranks of one host find each other; processes of other users are ignored --

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


# -- ranks use gloo where the system refuses shared memory at the start, and raise where it does later --

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
