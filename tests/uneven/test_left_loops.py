"""Loops over `step.join` or `fjoin.join` that are left before their end, in every form that Python has for it, or stopped.

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
from tests.helpers import raises_text, stepped
from tests.pool import Pool
from tests.ranks import programs
from tests.training.small import MEAN_SGD, step_of

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


# -- loops that one rank stops, on all ranks together --

SELDOM = tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 100)
# With the steps after which the ranks know of a request: one where no rank waits for the record of a step.
STOPPED: dict[str, tuple[tx.Pipeline, int]] = {
    "mean": (MEAN_SGD, 0), "local SGD": (tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 3), 1), "seldom": (SELDOM, 1),
    "seldom, skips": (tx.skip_if_nonfinite(SELDOM), 1), "zero": (tx.zero(tx.mean("data"), tx.sgd(0.1), "data"), 0),
    "mean, on a device": (MEAN_SGD, 1), "seldom, on a device": (SELDOM, 2), "no message": (tx.fuse(tx.identity(), tx.sgd(0.1)), 1),
}  # fmt: skip


def stopping(
    batches: list[Any], calls: dict[int, str], pipeline: str = "mean", accumulate: int = 1, several: bool = False
) -> tuple[int, bool, int, int]:
    """A run in which this rank stops in the iterations of `calls`, before or after its step.

    Returns:
        The number of iterations, whether the loop was stopped, the number of the state's steps, and the iterations of a second loop.
    """
    step, state = step_of(pipeline=STOPPED[pipeline][0], accumulate=accumulate)
    other, second = step_of(accumulate=accumulate) if several else (None, None)
    # The host reads the records of a device one step late, except where a rank reads its metrics.
    step.run.step_check.grads.on_device = "device" in pipeline
    reads = "device" in pipeline and bool(calls)
    loop = fjoin.join(batches, steps=[step, other]) if several else step.join(batches)
    found = []
    for stops in (calls, {}):
        n = 0
        for batch in loop:
            if stops.get(n) == "before":
                loop.stop()
            state, metrics = step(state, batch)
            if other is not None:
                second, _ = other(second, batch)
            assert not reads or metrics.weight > 0
            for _ in range({"after": 1, "twice": 2}.get(stops.get(n, ""), 0)):
                loop.stop()
            n += 1
        found += [n, loop.stopped, state.step]
    assert not found[4]
    step.flush(state)
    return found[0], found[1], found[2], found[3]


@pytest.mark.filterwarnings("ignore:.*nothing in the pipeline:UserWarning")
@pytest.mark.sample(3)
@pytest.mark.parametrize("pipeline", STOPPED)
@pytest.mark.parametrize("when", ["before", "after", "twice"])
def test_one_rank_of_three_stops(pipeline: str, when: str) -> None:
    batches = [[BATCH] * 9, [BATCH] * 7, [BATCH] * 2]
    for rank in (0, 2):  # with input, and without
        calls: list[dict[int, str]] = [{}, {}, {}]
        calls[rank] = {3: when}
        n = 4 + (when != "before") + STOPPED[pipeline][1]
        got = tx.simulate(lambda b, c: stopping(b, c, pipeline), {"data": 3}, batches, calls)
        assert got == [(n, True, n, 9)] * 3


def test_with_windows_the_loop_ends_with_the_next_one() -> None:
    batches = [[BATCH] * 12, [BATCH] * 11, [BATCH] * 2]
    for at, n in ((0, 3), (2, 6), (3, 6), (4, 6), (5, 9)):
        for pipeline in ("mean", "seldom"):
            got = tx.simulate(
                lambda b, c, p=pipeline: stopping(b, c, p, accumulate=3), {"data": 3}, batches, [{}, {at: "after"}, {}]
            )
            want = n + 3 * STOPPED[pipeline][1]
            assert got == [(min(want, 12), True, min(want, 12) // 3, 12)] * 3, (at, pipeline)


def test_several_steps_stop_together() -> None:
    got = tx.simulate(
        lambda b, c: stopping(b, c, several=True), {"data": 2}, [[BATCH] * 5, [BATCH] * 3], [{}, {1: "after"}]
    )
    assert got == [(3, True, 3, 5)] * 2


@pytest.mark.parametrize(
    "pipeline", ["mean", "local SGD", "seldom", "seldom, skips", "mean, on a device", "seldom, on a device"]
)
def test_a_request_of_the_last_iteration_does_not_stop_the_next_loop(pipeline: str) -> None:
    batches = [[BATCH] * 3, [BATCH] * 2]
    for when, was in (("before", True), ("after", False)):
        got = tx.simulate(lambda b, c: stopping(b, c, pipeline), {"data": 2}, batches, [{2: when}, {}])
        assert got == [(3, was, 3, 3)] * 2


def test_stop_outside_a_loop_raises() -> None:
    step, state = step_of()
    for loop in (step.join([BATCH]), fjoin.join([BATCH])):
        raises_text(fjoin.JoinError, loop.stop, "while no loop runs", "inside the body")
    loop = step.join([BATCH])
    state = stepped(step, state, loop)
    raises_text(fjoin.JoinError, loop.stop, "while no loop runs")


def stopped_in_own_loop(n: int, at: int | None) -> tuple[int, bool, int]:
    loop = fjoin.join(range(n), empty=0)
    seen = 0
    for _ in loop:
        if seen == at:
            loop.stop()
        seen += 1
    was = loop.stopped
    return seen, was, sum(1 for _ in loop)


def test_a_loop_of_ones_own() -> None:
    """The message for the next iteration has left when the body runs, so the loop ends with that one."""
    for rank in (0, 2):
        calls: list[int | None] = [None] * 3
        calls[rank] = 2
        assert tx.simulate(stopped_in_own_loop, {"data": 3}, [6, 5, 1], calls) == [(4, True, 6)] * 3
    # The last message of a loop tells that no rank has a batch, and a request that it does not carry is void.
    assert tx.simulate(stopped_in_own_loop, {"data": 2}, [3, 2], [2, None]) == [(3, False, 3)] * 2
    assert tx.simulate(stopped_in_own_loop, {"data": 2}, [3, 2], [1, None]) == [(3, True, 3)] * 2


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    program = Program(sys.argv[1], fjoin.mesh({"data": -1}, timeout_s=60))
    try:
        stopped = program.leave(by_keeping, sys.argv[2])
        print(program.steps, stopped, flush=True)
    except fjoin.FjoinError as error:
        print(type(error).__name__, error, flush=True)
