"""Ranks that end or stop outside the messages of a step: the others learn of it, and of the right rank; meshes that are closed."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ranks import Ranks

Report = Callable[[Any], None]
LONG_S = 300.0


def ended(report: Report, run: Callable[[], Any]) -> None:
    """Report how a function ends: (name of the error, its text, the rank it names)."""
    try:
        run()
    except Exception as error:
        report((type(error).__name__, str(error), getattr(error, "rank", None)))
    else:
        report(("fine", "", None))


def a_step(mesh: Any, loss: Callable[[Any, Any], Any] = lambda p, b: (p["w"] * b).sum()) -> Any:
    return fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh)


KEPT: list[Any] = []


class Bar:
    """Hands batches on, as progress bars do."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        KEPT.append(self)

    def __iter__(self) -> Any:
        for batch in self.batches:  # noqa: UP028
            yield batch


def hold_the_loop(rank: int, report: Report, how: str) -> None:
    step = a_step(fjoin.mesh({"data": -1}, timeout_s=LONG_S))
    state = step.init({"w": torch.ones(3)})
    batches = step.join([torch.ones(3)] * 4)
    KEPT.append(batches)

    def run() -> None:
        nonlocal state
        for i, batch in enumerate(Bar(batches) if how == "progress bar" else batches):
            if (rank, i) == (1, 2):
                report("leaving")
                if how == "raise":
                    raise ValueError("bad batch")
                break
            state, _ = step(state, batch)

    ended(report, run)


@pytest.mark.parametrize("how", ["break", "raise", "progress bar"])
def test_a_loop_that_is_kept_in_a_variable_ends_with_its_for_loop(how: str) -> None:
    with Ranks(2, hold_the_loop, how) as run:
        (kind, *_), (other, text, _) = (value for _, _, value in reversed(run.after("leaving", 2)))
        assert kind == ("ValueError" if how == "raise" else "fine")
        assert other == "PeerLost" and "rank 1 left the loop over step.join in iteration 2" in text


def blame(rank: int, report: Report) -> None:
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    pipeline, params = tx.fuse(tx.mean("data"), tx.sgd(0.1)), {"w": torch.ones(300)}

    def run() -> None:
        new, state = params, pipeline.init(params)
        loop = fjoin.join([torch.ones(300)] * 10, mesh=mesh)
        with fjoin.bind(mesh):
            for i, batch in enumerate(loop):
                if (rank, i) == (1, 3):
                    report("now")
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 0:
                    threading.Event().wait(0.05)  # the third rank notices first
                new, state = pipeline.step(new, {"w": batch}, state, weight=loop.weight)

    ended(report, run)


def test_error_names_the_lost_rank_not_one_that_left_its_loop() -> None:
    with Ranks(3, blame) as run:
        for _, _, (kind, text, rank) in run.after("now", 2):
            assert (kind, rank) == ("PeerLost", 1), text


def join_a_registered_module(rank: int, report: Report) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    fjoin.ddp.register(ddp, tx.mean("data"))

    def run() -> None:
        with fjoin.Join([ddp, optimizer]):
            for i in range(4):
                if (rank, i) == (1, 2):
                    report("now")
                    raise ValueError("bad batch")
                ddp(torch.ones(2, 4)).sum().backward()
                optimizer.step()

    ended(report, run)


def test_a_registered_hook_does_not_keep_the_connections_of_a_failed_join() -> None:
    with Ranks(2, join_a_registered_module) as run:
        (_, seconds, (kind, text, rank)), (_, _, (own, *_)) = run.after("now", 2)
        assert own == "ValueError"
        assert (kind, rank) == ("PeerLost", 1) and "ValueError: bad batch" in text and seconds < 10.0


def report_without_ending(rank: int, report: Report, what: str) -> None:
    """Rank 1 reports its own failure, or that it has noticed one of rank 2; no connection ends."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=LONG_S)
    errors = {
        "own": ValueError("bad batch"),
        "lost": fjoin.PeerLost("rank 1 lost rank 2", rank=2),
        "late": fjoin.CollectiveTimeout("rank 2 is stopped", rank=2),
    }

    def run() -> None:
        with fjoin.bind(mesh):
            if rank == 1:
                mesh.report(errors[what], 7)
            elif rank == 0:
                tx.psum(torch.ones(2), "data")

    ended(report, run)


@pytest.mark.parametrize(
    ("what", "kind", "rank", "text"),
    [
        ("own", "PeerLost", 1, "rank 1 failed in step 7: ValueError: bad batch"),
        ("lost", "PeerLost", 2, "rank 1 lost rank 2"),
        ("late", "CollectiveTimeout", 2, "rank 2 is stopped"),
    ],
)
def test_rank_that_waits_for_a_message_reads_failure_reports(what: str, kind: str, rank: int, text: str) -> None:
    with Ranks(3, report_without_ending, what) as run:
        ends = {who: end for who, _, end in (run.next(30) for _ in range(3))}
        assert ends[0][::2] == (kind, rank) and text in ends[0][1]
        assert ends[1][0] == ends[2][0] == "fine"


def make_meshes(rank: int, report: Report, how: str) -> None:
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
            step = a_step(None)
            step(step.init({"w": torch.ones(2)}), torch.ones(2))
            return
        with fjoin.mesh({"data": -1}) as mesh, fjoin.bind(mesh):
            tx.psum(torch.ones(2), "data")
            if how == "closed":
                mesh.close()
        ended(texts.append, lambda: tx.simulate(lambda: None, {"data": 1}) and mesh.exchange("", 0, len))

    texts: list[Any] = []
    one()
    before = used()
    for _ in range(3):
        one()
    report((before, used(), texts))


@pytest.mark.parametrize("how", ["dropped", "closed", "left"])
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_meshes_give_back_threads_and_descriptors(how: str) -> None:
    with Ranks(2, make_meshes, how) as run:
        for _ in range(2):
            _, _, (before, after, texts) = run.next(30)
            assert before == after
            assert how == "dropped" or all(kind == "JoinError" and "closed" in text for kind, text, _ in texts)


def interrupt(rank: int, report: Report, place: str) -> None:
    """Rank 1 is interrupted in a loss, in the body of a loop or in an evaluation; what each later call says on both ranks."""
    once = [place] if rank == 1 else []

    def at(here: str) -> None:
        if here in once:
            once.clear()
            os.kill(os.getpid(), signal.SIGINT)

    def loss_fn(params: Any, batch: Any) -> Any:
        at("loss")
        return (params["w"] * batch).sum()

    def count(batch: Any) -> Any:
        at("evaluate")
        return {"n": len(batch)}

    mesh, params, batches = fjoin.mesh({"data": -1}, timeout_s=LONG_S), {"w": torch.ones(2)}, [torch.ones(2)] * 3
    step = a_step(mesh, loss_fn)
    state = step.init(params)

    def train() -> None:
        new = state
        for batch in step.join(batches):
            new, _ = step(new, batch)
            at("body")

    def bound() -> None:
        with fjoin.bind(mesh):
            tx.psum(torch.ones(2), "data")

    runs: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: fjoin.evaluate(count, batches, mesh=mesh),
        "body": train,
        "loss": lambda: step(state, batches[0]),
    }
    try:
        runs[place]()
    except (KeyboardInterrupt, fjoin.PeerLost) as error:
        first = type(error).__name__
    later = [
        *runs.values(), bound, lambda: step.init(params), lambda: step.flush(state),
        lambda: list(fjoin.join(batches, mesh=mesh)), lambda: a_step(mesh).init(params),
    ]  # fmt: skip
    found = list[Any]()
    for run in later:
        ended(found.append, run)
    report((first, found))


@pytest.mark.parametrize(
    ("place", "reason"), [("loss", "KeyboardInterrupt"), ("body", "an interrupt"), ("evaluate", "KeyboardInterrupt")]
)
def test_every_later_error_names_the_interrupt(place: str, reason: str) -> None:
    with Ranks(2, interrupt, place) as run:
        for _ in range(2):
            rank, _, (first, found) = run.next(30)
            assert first == ("KeyboardInterrupt" if rank == 1 else "PeerLost")
            assert all(reason in text and kind != "fine" for kind, text, _ in found), found
