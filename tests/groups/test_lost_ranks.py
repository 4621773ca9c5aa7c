"""Ranks that fail, leave, are killed or stop: typed errors on the others, which name the right rank; meshes that are closed; what counts
as a failure of which rank."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.groups import Traffic
from fjoin.groups._failures import Failures
from fjoin.shared_memory import PeerGone
from fjoin.uneven import _loop
from tests.helpers import in_backward
from tests.ranks import KEPT, End, Ranks, end_of, ends
from tests.training.small import step_of

X = torch.ones(2)
LONG_S = 300.0  # a mesh's time-out, which no rank may need


class Bar:
    """Hands batches on, as progress bars do."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        KEPT.append(self)

    def __iter__(self) -> Any:
        for batch in self.batches:  # noqa: UP028
            yield batch


def leave(rank: int, how: str) -> list[End]:
    """Rank 1 leaves a loop that a variable holds, or calls the step in an iteration never or twice; then all calls."""

    def loop() -> None:
        new = state
        for i, batch in enumerate(Bar(batches) if how == "progress bar" else batches):
            odd = how if (rank, i) == (1, 2) else ""
            if odd in ("break", "progress bar"):
                break
            if odd == "raise":
                raise KeyError("user code")
            for _ in range({"never": 0, "twice": 2}.get(odd, 1)):
                new, _ = step(new, batch)

    def bound() -> None:
        with fjoin.bind(mesh):
            tx.psum(X, "data")

    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    step, state = step_of(mesh=mesh)
    batches = step.join([X] * 4)
    KEPT.append(batches)
    later = [
        lambda: fjoin.evaluate(lambda batch: {"n": len(batch)}, [X], mesh=mesh), lambda: step(state, X), lambda: list(step.join([X])),
        bound, lambda: step.init({"w": X, "v": X}), lambda: step.flush(state), lambda: list(fjoin.join([X], mesh=mesh)),
        lambda: step_of(mesh=mesh),
    ]  # fmt: skip
    return [end._replace(value=None) for end in map(end_of, [loop, *later])]


LEFT = "rank 1 left the loop over step.join in iteration 2"
# How rank 1 leaves it, its own error, and the reason that all give.
WAYS = [
    ("break", "fine", LEFT), ("progress bar", "fine", LEFT), ("raise", "KeyError", LEFT),
    ("never", "JoinError", "did not call the step in iteration 2"), ("twice", "JoinError", "called the step twice in iteration 2"),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("how", "own", "reason"), WAYS)
def test_the_reason_is_in_this_and_every_later_error_of_all_ranks(how: str, own: str, reason: str) -> None:
    (first, *later), (kind, *later_there) = (end.value for end in ends(2, leave, how))
    assert kind.kind == own and first.kind == "PeerLost" and reason in first.text, first
    for one in (*later, *later_there):
        assert one.kind in ("PeerLost", "JoinError") and reason in one.text, one
        assert "cannot go on, it failed before" in one.text or "was taken down after a failure" in one.text, one


def never_come(rank: int) -> None:
    """Rank 1 runs another program."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=5)  # on a busy machine a rank itself may be late by two seconds
    KEPT.append(mesh)
    if rank != 1:
        step_of(mesh=mesh)


def fail_in_init(rank: int) -> None:
    optimizer = tx.partition({"w": tx.sgd(0.1), "v" if rank == 1 else "*": tx.sgd(0.2)})
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    step_of(pipeline=tx.fuse(tx.mean("data"), optimizer), params={"w": X, "u": torch.ones(3)}, mesh=mesh)


def fail() -> Any:
    raise ValueError("bad batch")


def in_join(rank: int, where: str, counts: tuple[int, ...], registers: bool = False) -> None:
    """Rank 1 fails in the loop, or before or within a backward pass, while others wait in messages of the module.

    A hook does not keep the connections of a join that has failed. Errors are kept, with their frames, as a debugger keeps them.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    if registers:
        fjoin.ddp.register(ddp, tx.mean("data"))
    try:
        with fjoin.Join([ddp, optimizer]):
            for i in range(counts[rank]):
                place = where if (rank, i) == (1, 2) else ""
                out = fail() if place == "loop" else ddp(torch.ones(2, 4))
                out = fail() if place == "forward" else in_backward(out, fail) if place == "backward" else out
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        KEPT.append(error)
        raise


def in_hooks(rank: int, where: str) -> None:
    """Rank 1 fails in a loop with pure hooks, in its main hook or in its post hook."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    main = lambda state: fail() if (where, rank) == ("main", 1) else tx.psum(state, "data")  # noqa: E731
    post = lambda state, is_last_joiner: fail() if (where, rank) == ("post", 1) else tx.psum(state, "data")  # noqa: E731
    joinable = fjoin.as_joinable(tx.JoinHook(main, post), torch.zeros(3), mesh=mesh)
    with fjoin.bind(mesh), fjoin.Join([joinable]):
        for i in range(2 if rank == 1 else 4):
            fjoin.Join.notify_join_context(joinable)
            if (where, rank, i) == ("loop", 1, 1):
                fail()
            joinable.state = tx.psum(joinable.state, "data")


def around_a_module(rank: int) -> None:
    """The group that the loop takes down is also released by the module; what waits in it gets gloo's own error."""
    _loop._TOGETHER_S = 2.0  # the others wait in the module's messages, and see nothing
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    ddp = DistributedDataParallel(nn.Linear(5, 2))
    with contextlib.nullcontext() if rank == 1 else pytest.raises(RuntimeError):  # as PeerLost is one too
        for i in fjoin.join(range(4)):
            if (rank, i) == (1, 1):
                fail()
            ddp(torch.ones(2, 5)).sum().backward()


def report(rank: int, error: Exception) -> None:
    """Rank 1 reports its own failure, or that it has noticed one of rank 2, while rank 0 waits; no connection ends."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    KEPT.append(mesh)
    with fjoin.bind(mesh):
        if rank == 1:
            mesh.report(error, 7)
        elif rank == 0:
            tx.psum(X, "data")


def fail_alone(rank: int) -> None:
    """Rank 0 fails while a message is under way that no other rank takes part in, and does not wait for it."""
    torch.set_num_threads(1)
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    KEPT.append(mesh)
    if rank == 0:
        mesh.reduce_(torch.ones(100_000), ("data",))
        time.sleep(0.5)  # until a thread of gloo has begun it
        with mesh:
            fail()


def stop_early(rank: int, closes: bool) -> None:
    """Rank 1 closes its mesh, or drops it, and lives on."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    if rank != 1:
        with fjoin.bind(mesh):
            tx.psum(X, "data")
    elif closes:
        mesh.close()
        KEPT.append(mesh)


FINE, BAD = ("fine", None, ""), ("ValueError", None, "bad batch")
OF_ONE, IN_STEP = ("PeerLost", 1, "ValueError: bad batch"), ("PeerLost", 1, "in step 3: ValueError: bad batch")
LATE = ("CollectiveTimeout", 1, "rank 1 did not come")
UNMATCHED = "no pattern of partition matches 'u'"
TWO_LOST, TWO_LATE = fjoin.PeerLost("rank 1 lost rank 2", rank=2), fjoin.CollectiveTimeout("rank 2 stopped", rank=2)
# Of each rank its error, the rank that this names, and words.
TABLE: dict[str, tuple[Callable[..., None], tuple[Any, ...], list[Any]]] = {
    "another program": (never_come, (), [LATE, FINE, LATE]),
    "init": (fail_in_init, (), [("PeerLost", 1, UNMATCHED), ("ValueError", None, UNMATCHED)]),
    "Join": (in_join, ("loop", (4, 4), True), [OF_ONE, BAD]),
    "backward in a Join": (in_join, ("backward", (2, 4, 4)), [IN_STEP, BAD, IN_STEP]),
    # Two ranks shadow: four processes, on as few cores as there are.
    "ranks that shadow": (in_join, ("forward", (1, 4, 4, 1)), [IN_STEP, BAD, IN_STEP, IN_STEP]),
    **{f"pure hooks, {where}": (in_hooks, (where,), [OF_ONE, BAD, OF_ONE]) for where in ("loop", "main", "post")},
    "around a module": (around_a_module, (), [FINE, BAD, FINE]),
    "own report": (report, (ValueError("bad batch"),), [("PeerLost", 1, "rank 1 failed in step 7: ValueError: bad batch"), FINE, FINE]),
    "report of a lost rank": (report, (TWO_LOST,), [("PeerLost", 2, "rank 1 lost rank 2"), FINE, FINE]),
    "report of a late rank": (report, (TWO_LATE,), [("CollectiveTimeout", 2, "rank 2 stopped"), FINE, FINE]),
    "a closed mesh": (stop_early, (True,), [("PeerLost", 1, "closed its mesh"), FINE, ("PeerLost", 1, "closed its mesh")]),
    "a dropped mesh": (stop_early, (False,), [("PeerLost", 1, "closed its mesh"), FINE, ("PeerLost", 1, "closed its mesh")]),
    "a message under way": (fail_alone, (), [BAD, FINE, FINE]),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TABLE)
def test_errors_name_the_lost_rank(name: str) -> None:
    program, args, want = TABLE[name]
    start = time.monotonic()
    found = ends(len(want), program, *args)
    assert time.monotonic() - start < 20, "in some 5 s, on a machine that is not busy"
    assert [(end.kind, end.rank) for end in found] == [(kind, rank) for kind, rank, _ in want], found
    assert all(words in end.text for end, (*_, words) in zip(found, want, strict=True)), found


# -- ranks that are late, end early or continue after an error: none is taken for lost -----------------------------------

LATE_S = 3.2  # two looks at failures in a message, and more


def in_a_mesh(rank: int, report: Callable[[Any], None], where: str, transport: str) -> None:
    """Rank 1 dies before its second mesh, or inside it, once all have met: while they connect groups, or shared memory."""

    def die(*args: Any) -> None:
        report("dead")
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "second":
        fjoin.mesh({"data": -1}, timeout_s=LONG_S, transport=transport)
    if rank == 1 and where == "second":
        die()
    elif rank == 1:
        setattr(fjoin.groups._connect, where, die)
    report(end_of(lambda: fjoin.mesh({"data": -1}, timeout_s=LONG_S, transport=transport)))


@pytest.mark.parametrize(("where", "transport"), [("second", "gloo"), ("new_groups", "gloo"), ("connect", "shared")])
def test_a_rank_that_dies_before_or_inside_a_mesh_is_noticed_at_once(where: str, transport: str) -> None:
    with Ranks(3, in_a_mesh, where, transport) as run:
        found = run.after("dead", 2)
    for _, seconds, end in found:
        assert end.kind in ("PeerLost", "TransportError") and seconds < 20, end
        assert where == "connect" or "rank 1 has ended while the ranks made their mesh" in end.text


def rows(rank: int) -> None:
    """The ranks of the second row end while the first row continues."""
    mesh = fjoin.mesh({"row": 2, "data": 2}, timeout_s=LONG_S)
    with fjoin.bind(mesh):
        tx.psum(X, "data")
        if rank < 2:
            time.sleep(LATE_S * rank)
            tx.psum(X, "data")
    mesh.close()


def broadcast(rank: int, closes: bool) -> None:
    """Rank 2 has its part of a broadcast at once, and closes the mesh or ends, while the others wait for rank 1."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    with fjoin.bind(mesh):
        time.sleep(LATE_S * (rank == 1))
        tx.pbroadcast(X, "data", 0)
    if closes:
        mesh.close()
    elif rank == 2:
        del mesh
        os._exit(0)


def again(rank: int) -> None:
    """All ranks catch an error of the first meshes and make new ones."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    with fjoin.bind(mesh):
        tx.psum(X, "data")  # all have made it
    with contextlib.suppress(ValueError, fjoin.PeerLost):
        if rank == 0:
            with mesh:
                raise ValueError("bad checkpoint")
        step_of(mesh=mesh)
    time.sleep(LATE_S * rank)
    step, state = step_of(mesh=fjoin.mesh({"data": -1}, timeout_s=LONG_S))
    step(state, X)


def two_modules(rank: int) -> None:
    """The hook of a module raises on all ranks alike; another module over the same group works."""

    def refuse(grads: Any) -> None:
        time.sleep(0.5 * (rank == 0))  # rank 1 would be the first to report
        raise ValueError("the norm is too large")

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    for hook in (tx.chain(tx.mean("data"), tx.tap(refuse)), tx.mean("data")):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        fjoin.ddp.register(ddp, hook)
        for i in range(3):
            time.sleep(LATE_S * (rank == 1 and i == 2))
            try:
                ddp(torch.ones(1, 2)).sum().backward()
            except ValueError:
                break


def device_meshes(rank: int) -> None:
    """Meshes over a DeviceMesh are made and dropped, by one rank later than by the others."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    device_mesh, kept = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")), []
    for i in range(3):
        mesh = fjoin.mesh(device_mesh, timeout_s=LONG_S)
        with fjoin.bind(mesh):
            assert tx.psum(torch.ones(1), ("node", "local")) == 4
        if rank == i == 0:
            kept.append(mesh)


def fork(rank: int) -> None:
    """A forked process frees its copy of the mesh; then rank 0 has no descriptors left, while rank 1 is late."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    step, state = step_of(mesh=mesh)
    if (child := os.fork()) == 0:
        mesh.report_failure(ValueError("in the child"), None)
        mesh.close()
        del mesh, step, state
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    state, _ = step(state, X)
    if rank == 0:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    time.sleep(LATE_S * rank)
    step(state, X)


# A program with its arguments, its ranks, and how many of them are there at its end.
PROGRAMS: dict[str, tuple[tuple[Any, ...], int, int]] = {
    "rows": ((rows,), 4, 4), "broadcast": ((broadcast, True), 4, 4), "without close": ((broadcast, False), 4, 3),
    "again": ((again,), 2, 2), "two modules": ((two_modules,), 2, 2), "fork": ((fork,), 2, 2),
    "device meshes": ((device_meshes,), 4, 4),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_rank_is_taken_for_lost(name: str) -> None:
    program, n, left = PROGRAMS[name]
    assert ends(n, *program, left=left) == [End()] * left


# -- within bind, over both transports ----------------------------------------------------------------------------------

BLOCK = tx.fuse(tx.mean("data"), tx.sgd(0.1))
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "psum": lambda x: tx.psum(x, "data"),
    "all_gather": lambda x: tx.all_gather(x, "data"),
    "psum_scatter": lambda x: tx.psum_scatter(x, "data", tiled=True),
    "pbroadcast": lambda x: tx.pbroadcast(x, "data", 1),
    "grad": lambda x: torch.func.grad(lambda y: tx.psum(y, "data").sum())(x),
    "donate": lambda x: BLOCK.step({"w": x}, {"w": x.clone()}, BLOCK.init({"w": x}), donate=True),
}


def in_a_block(rank: int, call: str, transport: str, how: str, n: int) -> list[End]:
    """The end of the block, and that of a call within it."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=3.0 if how == "stop" else 60.0, transport=transport)
    x, inside = torch.ones(n), list[End]()
    with fjoin.bind(mesh):
        tx.psum(x, "data")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def twice() -> None:
        with fjoin.bind(mesh):
            try:
                for _ in range(2):
                    CALLS[call](x)
            except Exception as error:
                inside.append(End(type(error).__name__, str(error), getattr(error, "rank", None)))
                raise

    return [end_of(twice), *inside]


@pytest.mark.sample(12)
@pytest.mark.parametrize("n", [6, 60_000])
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_is_typed_inside_the_block(call: str, transport: str, how: str, n: int) -> None:
    (end,) = ends(2, in_a_block, call, transport, how, n, left=1)
    assert end.value, end
    outside, inside = end.value
    kind = "CollectiveTimeout" if how == "stop" else "PeerLost"
    assert (inside.kind, inside.rank, outside.kind) == (kind, 1, kind), outside.text


# -- meshes that are closed ----------------------------------------------------------------------------------------------


def make_meshes(rank: int, how: str) -> Any:
    """Threads and descriptors before and after, and how calls of closed meshes end."""

    def used() -> tuple[int, int]:
        """Once it stays the same for a while: threads end by themselves."""
        gc.collect()
        seen: list[tuple[int, int]] = []
        end = time.monotonic() + 20
        while len(seen) < 20 or (len(set(seen[-20:])) > 1 and time.monotonic() < end):
            seen.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
            time.sleep(0.01)
        return seen[-1]

    def one() -> None:
        if how == "dropped":
            step, state = step_of()
            step(state, X)
            return
        with fjoin.mesh({"data": -1}) as mesh, fjoin.bind(mesh):
            tx.psum(X, "data")
            if how == "closed":
                mesh.close()
        found.append(end_of(lambda: tx.simulate(lambda: None, {"data": 1}) and mesh.exchange("", 0, len)))

    found = list[End]()
    one()
    before = used()
    for _ in range(3):
        one()
    return before, used(), found


@pytest.mark.parametrize("how", ["dropped", "closed", "left"])
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_meshes_give_back_threads_and_descriptors(how: str) -> None:
    for end in ends(2, make_meshes, how):
        before, after, found = end.value
        assert before == after
        assert how == "dropped" or all(one.kind == "JoinError" and "closed" in one.text for one in found)


# -- what counts as a failure of which rank: processes that have ended, texts of errors --


class Values(dict[str, Any]):
    """A store in this process."""

    def set(self, seconds: float, key: str, value: Any) -> None:
        self[key] = value

    def add(self, seconds: float, key: str) -> int:
        self[key] = super().get(key, 0) + 1
        return int(self[key])

    def get(self, seconds: float, key: str) -> Any:  # type: ignore[override]
        return super().get(key)

    def get_all(self, seconds: float, keys: list[str]) -> list[Any]:
        return [self[key] for key in keys]


def failures(rank: int, ranks: list[int], store: Any) -> Failures:
    return Failures(store, "mesh", rank, ranks, Traffic())


def test_the_first_report_stays() -> None:
    store = Values()
    for rank in (1, 0):
        failures(rank, [0, 1, 2], store).report(ValueError(f"of rank {rank}"), 3)
    reported = failures(2, [0, 1, 2], store).reported()
    assert isinstance(reported, fjoin.PeerLost) and reported.rank == 1 and "ValueError: of rank 1" in str(reported)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    def gone(change: Callable[[list[Any]], list[Any]]) -> set[int]:
        store = Values()
        found = failures(0, [0, 1], store)
        store["process/1"] = change(store["process/0"])
        return found.gone()

    assert gone(lambda own: own) == set() and gone(lambda own: [*own[:2], "1"]) == {1}
    assert gone(lambda own: [own[0], 2**22 + 1, "1"]) == {1}
    # Of another host, and of a process that did not see itself in /proc, nothing is known.
    assert gone(lambda own: ["elsewhere", 2**22 + 1, "1"]) == gone(lambda own: [own[0], 2**22 + 1, None]) == set()


def test_error_does_not_name_a_rank_that_lost_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of two axes rank 2 sees rank 0 close its connections, since rank 0 has lost rank 1."""
    found = failures(2, [10, 11, 12, 13], Values())
    for gone, blamed in (({1}, 1), ({0, 1}, None), (set(), 0), ({0}, 0)):
        monkeypatch.setattr(found, "gone", lambda gone=gone: gone)
        cause = found.root_cause(PeerGone(10), 3)
        assert isinstance(cause, fjoin.PeerLost) and (cause.rank, cause.step) == (blamed, 3), str(cause)


# An error of user code with a similar text does not count.
TEXTS = {
    "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1": "PeerLost",
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation": "CollectiveTimeout",
    "Application timeout caused pair closure": "CollectiveTimeout",  # the messages behind the one that waited
    **dict.fromkeys(("DataLoader timed out after 5 seconds", "the connection pool of my loader is empty", "websocket handshake refused",
                     "Lock wait timeout exceeded", "timed out waiting for the data server"), "RuntimeError"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), TEXTS.items())
def test_errors_that_count_as_a_lost_peer(text: str, kind: str) -> None:
    assert type(failures(0, [0], Values()).root_cause(RuntimeError(text), 0)).__name__ == kind
