"""Loops over `step.join` or `fjoin.join` that are left before their end, in every form that Python has for it.

How a loop was left is no guess: closed or dropped between two steps it ends where all ranks leave it. One rank alone is an error
on all.

python -m tests.uneven.test_left_loops kind case      one rank that leaves it when the interpreter ends
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.pool import Pool
from tests.ranks import programs

ROOT = Path(__file__).parents[2]
N = 3  # steps before a loop is left
BATCH = torch.ones(2)
Body = Callable[[Any], None]


def by_break(loop: Any, n: int, body: Body) -> None:
    for i, batch in enumerate(loop):
        body(batch)
        if i + 1 == n:
            break


def before_a_step(loop: Any, n: int, body: Body) -> None:
    for i, batch in enumerate(loop):
        if i == n:
            return
        body(batch)


def by_islice(loop: Any, n: int, body: Body) -> None:
    for batch in itertools.islice(loop, n):
        body(batch)


def by_zip(loop: Any, n: int, body: Body) -> None:
    for _, batch in zip(range(n), loop, strict=False):
        body(batch)


def by_zip_with_a_batch_more(loop: Any, n: int, body: Body) -> None:
    for batch, _ in zip(loop, range(n), strict=False):
        body(batch)


def by_next(loop: Any, n: int, body: Body) -> None:
    batches = iter(loop)
    for _ in range(n):
        if (batch := next(batches, None)) is None:
            return
        body(batch)


def by_a_generator(loop: Any, n: int, body: Body) -> None:
    def bar() -> Iterator[Any]:
        with torch.enable_grad():
            yield from enumerate(loop)

    for i, batch in bar():
        body(batch)
        if i + 1 == n:
            break


def by_close(loop: Any, n: int, body: Body) -> None:
    batches = iter(loop)
    for batch in itertools.islice(batches, n):
        body(batch)
    batches.close()


def by_a_collection(loop: Any, n: int, body: Body) -> None:
    holder = SimpleNamespace(batches=iter(loop))
    holder.itself = holder
    for batch in itertools.islice(holder.batches, n):
        body(batch)
    del holder
    gc.collect()


FORMS = {form.__name__: form for form in (
    by_break, before_a_step, by_islice, by_zip, by_zip_with_a_batch_more, by_next, by_a_generator, by_close, by_a_collection,
)}  # fmt: skip
KINDS = ("step.join", "fjoin.join", "fjoin.join(steps=)")
# All leave after the same step; rank 1 leaves and the others go on; an exception in the body of rank 1, and in all; rank 1 calls stop.
CASES = ("together", "alone", "exception", "exceptions", "stop")


class Program:
    """A rank's loops; each batch of ones takes one step.

    Attributes:
        steps: The number of steps taken.
        last: The time of the last one.
    """

    def __init__(self, kind: str, mesh: Any) -> None:
        self._kind, self.mesh, self.steps, self.last = kind, mesh, 0, time.monotonic()
        pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))
        self._step = fjoin.train_step(lambda params, batch: (params["w"] * batch).sum(), pipeline, mesh=mesh)
        self._state = self._step.init({"w": torch.zeros(2)})

    def loop(self, n: int) -> Any:
        loader = itertools.repeat(BATCH, n)
        if self._kind == "step.join":
            return self._step.join(loader)
        return fjoin.join(loader, steps=[self._step]) if "steps" in self._kind else fjoin.join(loader, mesh=self.mesh)

    def body(self, batch: Any) -> None:
        if self._kind == "fjoin.join":
            with fjoin.bind(self.mesh):
                assert tx.psum(torch.ones(()), "data") == self.mesh.size
        else:
            self._state, _ = self._step(self._state, batch)
        self.steps, self.last = self.steps + 1, time.monotonic()

    def leave(self, form: Callable[[Any, int, Body], None], case: str, n: int = N) -> bool:
        """Loop once, and leave the loop after n steps or at its end; returns whether it was stopped."""
        one = self.mesh.rank == 1
        loop = self.loop(10 * N)

        def body(batch: Any) -> None:
            self.body(batch)
            if self.steps == N and (case == "exceptions" or (case == "exception" and one)):
                raise ValueError("bad batch")
            if self.steps == N and case == "stop" and one:
                loop.stop()

        form(loop, n if case == "together" or (case == "alone" and one) else 10 * N + 1, body)
        return loop.stopped  # type: ignore[no-any-return]


def outcome(kind: str, form: str, case: str, mesh: Any) -> tuple[Any, ...]:
    """The steps of a rank and whether its first loop was stopped, or its first error; it goes on with two steps more."""
    program, stopped = Program(kind, mesh), False
    try:
        try:
            stopped = program.leave(FORMS[form], case)
        except ValueError:
            if case == "exception":
                raise
        gc.collect()
        found = fjoin.evaluate(lambda batch: {"mean": batch.mean()}, [BATCH] * (mesh.rank + 1), mesh=mesh)
        assert found.batches == mesh.size * (mesh.size + 1) // 2
        for batch in program.loop(2):
            program.body(batch)
        result: tuple[Any, ...] = program.steps, stopped
    except (ValueError, fjoin.FjoinError) as error:
        result = type(error).__name__, str(error), time.monotonic() - program.last
    gc.collect()  # while there is a mesh
    return result


def on_ranks(kind: str, form: str, case: str, transport: str) -> tuple[Any, str]:
    """The outcome on a rank of the pool, and what it has written to stderr."""
    with tempfile.TemporaryFile("w+") as file:
        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            mesh = fjoin.mesh({"data": -1}, transport=transport, timeout_s=60)
            found = outcome(kind, form, case, mesh)
            del mesh
            gc.collect()
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
        file.seek(0)
        return found, file.read()


def within_a_window() -> Any:
    """All ranks leave with half a window; rank 1 has fewer batches."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    step = fjoin.train_step(
        lambda params, batch: params["w"].sum(), tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh, accumulate=2
    )
    state, calls = step.init({"w": torch.zeros(2)}), 0
    for batch in step.join([BATCH] * (9 - 5 * mesh.rank)):
        state, _ = step(state, batch)
        calls += 1
        if calls == 7:
            break
    return state.step, state.batches, fjoin.evaluate(lambda batch: {"one": 1.0}, [BATCH], mesh=mesh).batches


def at_once() -> Any:
    """Rank 0 leaves before its first step."""
    program = Program("step.join", fjoin.mesh({"data": -1}, timeout_s=60))
    try:
        program.leave(before_a_step, "together", 10 * program.mesh.rank)
    except fjoin.FjoinError as error:
        return type(error).__name__, str(error)
    return None


def check(kind: str, case: str, found: list[tuple[Any, ...]]) -> None:
    """Look at the outcomes of two ranks, of which rank 1 leaves the loop first where one of them does."""
    if case == "stop":
        assert found[0] == found[1] and N <= found[0][0] - 2 <= N + 2 and found[0][1] is True
    elif case in ("together", "exceptions"):
        assert found == [(N + 2, False)] * 2
    else:
        error, text, seconds = found[0]
        name = "fjoin.join" if "fjoin" in kind and "steps" not in kind else "step.join"
        assert error == "PeerLost" and f"rank 1 left the loop over {name} in iteration" in text and "stop()" in text
        assert found[1][0] in (["ValueError"] if case == "exception" else ["JoinError", "PeerLost"])
        assert seconds < 3, "in half a second, on a machine that is not busy"


@pytest.mark.sample(16)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_left(pool: Pool, kind: str, form: str, case: str, transport: str) -> None:
    results = pool.run(2, on_ranks, kind, form, case, transport)
    check(kind, case, [found for found, _ in results])
    assert [errors for _, errors in results] == ["", ""]


def test_within_a_window(pool: Pool) -> None:
    assert pool.run(2, within_a_window) == [(3, 7, 2), (3, 4, 2)]


def test_one_rank_leaves_before_its_first_step(pool: Pool) -> None:
    _, (kind, text) = pool.run(2, at_once)
    assert kind == "PeerLost" and "rank 0 left the loop over" in text and "stop()" in text


@pytest.mark.long
@pytest.mark.parametrize("case", [None, "together", "alone", "exception", "stop"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_iterator_that_lives_until_the_interpreter_ends(kind: str, case: str | None) -> None:
    """Nothing is printed, and no rank waits; `None` is one rank alone. Another rank that goes on gets an error."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [{}] if case is None else [{**meet, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    command = [sys.executable, "-m", "tests.uneven.test_left_loops", kind, case or "together"]
    found = programs(command, [{"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **own} for own in ranks], 60)
    outs, reports = [out for out, *_ in found], [errors for _, errors, _ in found if errors]
    if case == "stop":
        assert outs[0] == outs[1] and "True" in outs[0]
    elif case in ("alone", "exception"):
        assert outs[0].startswith("PeerLost") and outs[1] == (f"{N} False\n" if case == "alone" else "")
    else:
        assert set(outs) == {f"{N} False\n"}
    assert len(reports) == (case == "exception")  # Python's own report of it, and nothing behind that
    assert all(report.endswith("ValueError: bad batch\n") and report.count("Traceback") == 1 for report in reports)


def by_keeping(loop: Any, n: int, body: Body) -> None:
    KEPT.append(iter(loop))
    by_islice(KEPT[0], n, body)


KEPT: list[Any] = []

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    program = Program(sys.argv[1], fjoin.mesh({"data": -1}, timeout_s=60))
    try:
        stopped = program.leave(by_keeping, sys.argv[2])
        print(program.steps, stopped, flush=True)
    except fjoin.FjoinError as error:
        print(type(error).__name__, error, flush=True)
