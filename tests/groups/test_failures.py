"""Ranks that fail, are killed or stop: typed errors on the others, naming rank and step, in bounded time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.groups import Traffic
from fjoin.groups._failures import Failures
from tests.ranks import Ranks

Report = Callable[[Any], None]


class Values(dict[str, Any]):
    """A store in this process."""

    def set(self, seconds: float, key: str, value: Any) -> None:
        self[key] = value

    def get(self, seconds: float, key: str) -> Any:  # type: ignore[override]
        return super().get(key)

    def get_all(self, seconds: float, keys: list[str]) -> list[Any]:
        return [self[key] for key in keys]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    def gone(change: Callable[[list[Any]], list[Any]]) -> set[int]:
        store: Any = Values()
        failures = Failures(store, "mesh", 0, [0, 1], Traffic())
        store["mesh/process/1"] = change(store["mesh/process/0"])
        return failures.gone()

    assert gone(lambda own: own) == set() and gone(lambda own: [*own[:2], "1"]) == {1}
    assert gone(lambda own: [own[0], 2**22 + 1, "1"]) == {1}
    # Of another host, and of a process that did not see itself in /proc, nothing is known.
    assert gone(lambda own: ["elsewhere", 2**22 + 1, "1"]) == gone(lambda own: [own[0], 2**22 + 1, None]) == set()


def leave(rank: int, report: Report, how: str) -> None:
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)),
                            mesh=fjoin.mesh({"data": -1}, timeout_s=300))  # fmt: skip
    state = step.init({"w": torch.ones(3)})

    def loop() -> None:
        nonlocal state
        for i, batch in enumerate(step.join([torch.ones(3)] * 4)):
            if rank == 1 and i == 2:
                if how == "break":
                    break
                if how == "never":
                    continue
                if how == "twice":
                    state, _ = step(state, batch)
                if how == "raise":
                    raise KeyError("user code")
            state, _ = step(state, batch)

    texts = []
    for attempt in (loop, lambda: step(state, torch.ones(3))):
        try:
            attempt()
            texts.append(("fine", ""))
        except Exception as error:
            texts.append((type(error).__name__, str(error)))
    report(texts)


@pytest.mark.parametrize(
    ("how", "own", "reported"),
    [
        ("break", "fine", "rank 1 left the loop over step.join in iteration 2"),
        ("raise", "KeyError", "rank 1 left the loop over step.join in iteration 2"),
        ("never", "JoinError", "did not call the step in iteration 2"),
        ("twice", "JoinError", "called the step twice in iteration 2"),
    ],
)
def test_leaving_the_loop_is_an_error_on_all_ranks(how: str, own: str, reported: str) -> None:
    with Ranks(2, leave, how) as run:
        for _ in range(2):
            rank, _, (first, second) = run.next(30)
            if rank == 1:
                assert first[0] == own
                assert second[0] == "JoinError" and "cannot go on" in second[1]
            else:
                assert first[0] == "PeerLost" and reported in first[1], first
                assert second[0] == "PeerLost" and "cannot go on" in second[1]


KEPT: list[Any] = []


def never_come(rank: int, report: Report) -> None:
    mesh = fjoin.mesh({"data": -1}, timeout_s=2)
    if rank == 1:  # runs another program
        KEPT.append(mesh)
        return
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh)
    try:
        step.init({"w": torch.ones(3)})
    except fjoin.CollectiveTimeout as error:
        report((str(error), error.rank))


def test_a_rank_in_another_program_is_reported() -> None:
    with Ranks(3, never_come) as run:
        reports = [run.next(30) for _ in range(2)]
        assert sorted(rank for rank, _, _ in reports) == [0, 2]
        for _, _, (text, missing) in reports:
            assert missing == 1 and "rank 1 did not come" in text and "same program" in text


def fail_in_init(rank: int, report: Report) -> None:
    optimizer = tx.partition({"w": tx.sgd(0.1), "v" if rank == 1 else "*": tx.sgd(0.2)})
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), optimizer),
                            mesh=fjoin.mesh({"data": -1}, timeout_s=300))  # fmt: skip
    try:
        step.init({"w": torch.ones(3), "u": torch.ones(3)})
    except Exception as error:
        report((type(error).__name__, str(error)))


def test_a_rank_that_fails_while_setting_up_is_reported() -> None:
    with Ranks(2, fail_in_init) as run:
        for _ in range(2):
            rank, _, (kind, text) = run.next(30)
            assert "no pattern of partition matches 'u'" in text
            assert kind == ("PeerLost" if rank == 0 else "ValueError")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1", "PeerLost"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation", "CollectiveTimeout"),
        ("Application timeout caused pair closure", "CollectiveTimeout"),  # the messages behind the one that waited
        ("DataLoader timed out after 5 seconds", "RuntimeError"),
        ("the connection pool of my loader is empty", "RuntimeError"),
        ("websocket handshake refused", "RuntimeError"),
        ("Lock wait timeout exceeded", "RuntimeError"),
        ("timed out waiting for the data server", "RuntimeError"),
    ],
)
def test_errors_that_count_as_a_lost_peer(pool: Any, text: str, kind: str) -> None:
    """An error of user code with a similar text does not count."""
    assert pool.run(1, account_of, text) == [kind]


def account_of(text: str) -> str:
    return type(fjoin.mesh({"data": -1}).root_cause(RuntimeError(text), 0)).__name__


def fail(rank: int, report: Report, transport: str, where: str) -> None:
    """Rank 1 fails in the fourth step, or beside it; all report what they can read then."""
    torch.set_num_threads(1)
    mesh = fjoin.mesh({"data": -1}, timeout_s=60, transport=transport)
    calls = 0

    def bad(place: str) -> None:
        if rank == 1 and calls == 4 and place == where:
            raise ValueError("bad batch")

    def loss_fn(params: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        bad("before the parameters are used")
        y = params["a"].sum() * batch.sum() * (rank + 1)
        bad("after the first use")
        return y + (params["b"] * batch.sum()).sum()

    pipeline = tx.zero(tx.mean("data"), tx.adamw(0.1), "data")
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, bucket_bytes=1000)
    state = step.init({"a": torch.ones(30001), "b": torch.ones(40003)})
    batches = [torch.ones(2)] * 8
    try:
        for _ in step.join(batches) if where == "the body of a loop" else batches:
            if where == "the body of a loop" and rank == 1 and calls == 3:
                raise ValueError("bad batch")
            state, _ = step(state, batches[0])
    except Exception as error:
        sums = [round(float(value.sum()), 3) for value in state.params.values()]
        report((type(error).__name__, state.step, sums, len(tx.to_state_dict(state.pipeline)) > 0))


PLACES = ["before the parameters are used", "after the first use", "the body of a loop"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("where", PLACES)
def test_the_state_of_the_last_step_can_be_read_on_all_ranks(where: str, transport: str) -> None:
    with Ranks(3, fail, transport, where) as run:
        found = sorted(run.next() for _ in range(3))
    kinds, steps, sums, read = zip(*(value for _, _, value in found), strict=True)
    assert kinds == ("PeerLost", "ValueError", "PeerLost")
    assert steps == (3, 3, 3) and all(read)
    assert sums[0] == sums[1] == sums[2]
    assert sums[0][0] < 30001 - 3 * 0.09 * 30001, "three steps of about 0.1"


def fail_alone(rank: int, report: Report) -> None:
    """Rank 0 fails while a message is under way that no other rank takes part in."""
    torch.set_num_threads(1)
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    KEPT.append(mesh)  # on the other ranks beyond this function
    if rank == 0:
        mesh.reduce_(torch.ones(100_000), ("data",))
        time.sleep(0.5)  # until a thread of gloo has begun it
        begin = time.monotonic()
        try:
            with mesh:
                raise ValueError("bad batch")
        except ValueError:
            report(time.monotonic() - begin)


def test_failure_does_not_wait_for_pending_messages() -> None:
    with Ranks(3, fail_alone) as run:
        seconds = run.next()[2]
    assert seconds < 20, "it is the mesh's time-out otherwise"
