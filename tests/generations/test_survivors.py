"""Runs whose ranks die and come: they end as a run without deaths does in which each step has the same ranks, to the bit."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.generations.runs import ANY, KILL, LOSE, STOP, Options, Plan, Run, running

# The places of a step, by what its process does there. A death at each, in turn, while a newcomer replaces the last one.
PLACES = [
    *(("load", 2), ("body", 2), ("weight", 2), ("forward", 2), ("loss", 2), ("backward 2", 2)),
    *(("backward 1", 2), ("backward 0", 2), ("averaged", 2), ("stepped", 2), ("after", 2), ("resumed", 1)),
]
long = pytest.mark.long


@pytest.mark.parametrize(
    ("transport", "half"),
    [("gloo", 0), ("shared", 1), pytest.param("gloo", 1, marks=long), pytest.param("shared", 0, marks=long)],
)
def test_a_rank_dies_at_each_place_of_a_step(tmp_path: Path, transport: str, half: int) -> None:
    with running(tmp_path, Options(transport=transport, epochs=5, pause_s=0.05)) as run:
        for number, (place, count) in enumerate(PLACES[half::2]):
            if number:
                run.wait("hit", number)
            else:
                run.start([])
                run.start([])
            run.start([(place, ANY, count, KILL)])
        assert run.finish() == ["returned"] * 2
        assert {2, 3} <= set(run.check())
        held = [line["held"] for line in run.lines() if "held" in line and line["process"] == 0]
    # Descriptors, threads of Python, and all threads; what is in circles is freed now and then.
    assert len(held) > 6 and all(now - first < 12 for now, first in zip(held[-1], held[0], strict=True)), held


# Name -> the plans of the first processes, those of processes that come later with the key they wait for, the options,
# and how many processes return.
ATTACKS: dict[str, tuple[list[Plan], list[tuple[str, Plan]], Options, int]] = {
    "a member dies before it is connected": (
        [[("forward", 1, 4, KILL)], [("record", 2, 1, KILL)], [], []], [], Options(ranks=4), 2,
    ),
    "a member dies while all connect, and one comes": (
        [[("forward", 1, 4, KILL)], [("connecting", 2, 1, KILL)], [], []], [("hit", [])], Options(ranks=4, pause_s=0.05), 3,
    ),
    "a member dies before it resumes": (
        [[("forward", 1, 4, KILL)], [("connected", 2, 1, KILL)], [], []], [], Options(ranks=4), 2,
    ),
    "the donor dies while it sends": (
        [[("forward", 1, 4, KILL)], [("send", ANY, 3, KILL)], []], [("hit", [])], Options(pause_s=0.05), 2,
    ),
    "a newcomer dies before it is connected": (
        [[("forward", 1, 4, KILL)], [], []], [("hit", [("record", ANY, 1, KILL)])], Options(pause_s=0.05), 2,
    ),
    "a newcomer dies while it takes the state": (
        [[("forward", 1, 4, KILL)], [], []], [("hit", [("take", ANY, 3, KILL)])], Options(pause_s=0.05), 2,
    ),
    "two die in one step": ([[("forward", 1, 4, KILL)], [("backward 2", 1, 4, KILL)], []], [], Options(), 1),
    "too few are left until one comes": (
        [[("forward", 1, 4, KILL)], [("forward", 1, 4, KILL)], []], [("hit", [])], Options(at_least=2), 2,
    ),
    "some have taken the step and others have not": ([[("averaged", 1, 4, LOSE)], [], []], [], Options(), 3),
    "in the last step": ([[("forward", 1, 16, KILL)], [], []], [], Options(), 2),
    "at the end of training": ([[("end", 1, 1, KILL)], [], []], [], Options(), 2),
    "within a window": ([[("forward", 1, 6, KILL)], [], []], [], Options(accumulate=3), 2),
}  # fmt: skip
MAIN = {
    "a member dies while all connect, and one comes",
    "a member dies before it is connected",
    "the donor dies while it sends",
    "some have taken the step and others have not",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in MAIN else long) for name in ATTACKS])
def test_attacks(tmp_path: Path, name: str) -> None:
    plans, later, options, returned = ATTACKS[name]
    with running(tmp_path, options) as run:
        for plan in plans:
            run.start(plan)
        for key, plan in later:
            run.wait(key)
            run.start(plan)
        assert run.finish() == ["returned"] * returned
        run.check()


def test_a_run_whose_rank_dies_saves_on(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with running(tmp_path, Options(folder=str(folder))) as run:
        for plan in ([("body", 1, 7, KILL)], [], []):
            run.start(plan)  # type: ignore[arg-type]
        assert run.finish() == ["returned"] * 2
        run.check()
    assert [path.name for path in sorted(folder.glob("step-*"))] == [f"step-{n:08}" for n in (4, 8, 12, 16)]


def test_all_members_die_and_newcomers_take_the_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, Options(folder=str(tmp_path / "runs"))) as run:
        for _ in range(3):
            run.start([("body", 1, 7, KILL)])
        run.wait("hit", 3)
        for _ in range(3):
            run.start([])
        assert run.finish() == ["returned"] * 3
        run.check()
        assert {line["at"] for line in run.lines() if "at" in line} == {0, 4}


def test_a_redone_step_has_the_random_numbers_of_the_failed_one(tmp_path: Path) -> None:
    """Those of its batch and of the model."""
    with running(tmp_path, Options(program="random")) as run:
        for plan in ([("forward", 1, 4, KILL)], [], []):
            run.start(plan)  # type: ignore[arg-type]
        run.finish()
        run.check()
        drawn = dict[tuple[int, int], list[Any]]()
        for line in run.lines():
            if "draws" in line:
                drawn.setdefault((line["process"], line["before"]), []).append(line["draws"])
    redone = [draws for draws in drawn.values() if len(draws) > 1]
    assert len(redone) == 2
    assert all(draws[0] == other for draws in redone for other in draws)
    assert len({(process, *draws[0]) for (process, _), draws in drawn.items()}) == len(drawn)


def test_an_error_of_the_training_function_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path, Options(program="raise")) as run:
        for _ in range(3):
            run.start([])
        ends = sorted(run.finish())
        run.start([])
        ends += run.finish()[3:]
    assert ends[0] == "KeyError: 'user code'"
    assert all(end.startswith("PeerLost") and "user code" in end and "new store" in end for end in ends[1:])


def test_a_loop_that_one_rank_leaves_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path, Options(program="break")) as run:
        for _ in range(3):
            run.start([])
        ends = sorted(run.finish())
    assert [end.partition(":")[0] for end in ends] == ["JoinError", "PeerLost", "PeerLost"]
    assert all("rank 1 left the loop over step.join in iteration 5, and others have not" in end for end in ends), ends


def test_a_healthy_step_sends_no_message_more(tmp_path: Path) -> None:
    with running(tmp_path, Options(ranks=2, transport="gloo", program="count")) as run:
        run.start([])
        run.start([])
        run.finish()
    counts = {
        (line["process"], line["loop"]): (line["sent"], len(line["seconds"])) for line in run.lines() if "loop" in line
    }
    assert len(counts) == 4, run.errors()
    ((messages, steps),) = set(counts.values())
    assert messages > steps


def test_a_process_that_comes_after_the_end_returns_none(tmp_path: Path) -> None:
    with running(tmp_path, Options(ranks=1, transport="gloo")) as run:
        run.start([])
        assert run.finish() == ["returned"]
        run.start([])
        assert run.finish() == ["returned", "came late"]


@long
def test_a_rank_on_another_host_that_says_nothing_is_out_before_the_time_out(tmp_path: Path) -> None:
    """It is stopped, so that its connections stay, as when a host loses its power."""
    with running(tmp_path, Options(program="hosts", transport="gloo", timeout_s=60.0)) as run:
        for plan in ([("forward", 1, 4, STOP)], [], []):
            run.start(plan)  # type: ignore[arg-type]
        run.wait("final", 2, 25)
        run.processes[0].kill()
        run.finish()
        run.check()
        (stopped,) = (line["time"] for line in run.lines() if "hit" in line)
        again = min(line["time"] for line in run.lines() if line.get("g", 0) > 1)
    assert 4 < again - stopped < 20


@pytest.mark.parametrize("death", [False, True])
def test_the_loss_of_the_store_is_an_error_that_names_it(tmp_path: Path, death: bool) -> None:
    """At the end of an epoch, or as soon as a rank dies; what has been trained so far is whole."""
    with running(tmp_path, Options(timeout_s=5.0, pause_s=0.05)) as run:
        for _ in range(3):
            run.start([])
        run.wait("step", 9)
        run.store.kill()
        if death:
            run.processes[0].kill()
        ends = run.finish()
    assert len(ends) == 3 - death
    assert all(end.startswith("PeerLost") and f"the store at {run.address}" in end for end in ends), ends


@pytest.fixture
def cut() -> Iterator[tuple[str, Callable[[], object]]]:
    """The file of a network beside ours, and a function that cuts it off. Ours has 10.213.0.1, by `fja`."""

    def ip(line: str) -> int:
        return subprocess.run(["ip", *line.split()], capture_output=True).returncode

    if shutil.which("ip") is None or os.geteuid() or ip("netns add fjoin"):
        pytest.skip("needs root, and the right to make networks")
    try:
        made = [
            *("link add fja type veth peer name fjb netns fjoin", "addr add 10.213.0.1/24 dev fja", "link set fja up"),
            *("-n fjoin addr add 10.213.0.2/24 dev fjb", "-n fjoin link set fjb up", "-n fjoin link set lo up"),
        ]
        if any([ip(line) for line in made]):
            pytest.skip("needs virtual network interfaces")
        yield "/run/netns/fjoin", lambda: ip("link set fja down")
    finally:
        ip("link del fja")
        ip("netns del fjoin")


@long
def test_the_side_of_a_network_that_has_the_store_goes_on(tmp_path: Path, cut: Any) -> None:
    network, divide = cut
    with running(tmp_path, Options(program="hosts", transport="gloo", timeout_s=20.0, epochs=4, pause_s=0.1)) as run:
        run.address = run.address.replace("127.0.0.1", "10.213.0.1")
        for where in ("", "", network):
            run.start([], (where, "fjb" if where else "fja"))
        run.wait("of", 9)
        divide()
        ends = run.finish()
        ledger = run.check()
    assert sorted(ends)[0].startswith("PeerLost: the process that holds the store at 10.213.0.1")
    assert sorted(ends)[1:] == ["returned"] * 2
    assert set(ledger) == {2, 3}


def _stop_for(seconds: float) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.wait("hit")
        time.sleep(seconds)
        run.signal(0, "SIGCONT")

    return act


@long
@pytest.mark.parametrize(("seconds", "generations"), [(1.0, {1}), (9.0, {1, 2, 3})])
def test_a_rank_that_is_stopped_is_out_after_the_time_out_and_comes_back(
    tmp_path: Path, seconds: float, generations: set[int]
) -> None:
    with running(tmp_path, Options(timeout_s=3.0, epochs=4, pause_s=0.3)) as run:
        for plan in ([("forward", 1, 4, STOP)], [], []):
            run.start(plan)  # type: ignore[arg-type]
        _stop_for(seconds)(run)
        assert run.finish() == ["returned"] * 3
        run.check()
        assert {line["generation"] for line in run.lines() if "generation" in line} == generations


@long
@pytest.mark.parametrize(
    ("transport", "ranks", "victims"), [("gloo", 3, 1), ("shared", 3, 1), ("gloo", 4, 2), ("shared", 4, 2)]
)
@pytest.mark.parametrize("seed", range(50))
def test_random_kills(tmp_path: Path, transport: str, ranks: int, victims: int, seed: int) -> None:
    chance = random.Random(f"{transport} {ranks} {seed}")
    with running(tmp_path, Options(ranks=ranks, transport=transport, epochs=3, pause_s=0.01)) as run:
        for _ in range(ranks):
            run.start([])
        if seed % 5:  # else from the start of the processes on
            run.wait("of", ranks)
        for number in chance.sample(range(ranks), victims):
            time.sleep(chance.uniform(0.0, 0.4))
            run.processes[number].kill()
        assert len(run.finish()) >= ranks - victims
        run.check()


@long
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_eight_kills_and_newcomers(tmp_path: Path, transport: str, accumulate: int, seed: int) -> None:
    chance = random.Random(f"{transport} {accumulate} {seed}")
    with running(tmp_path, Options(transport=transport, epochs=40, accumulate=accumulate, pause_s=0.03)) as run:
        for _ in range(3):
            run.start([])
        run.wait("of", 3)
        living = [0, 1, 2]
        for _ in range(8):
            time.sleep(chance.uniform(0.2, 0.8))
            victim = living.pop(chance.randrange(3))
            run.processes[victim].kill()
            time.sleep(chance.uniform(0.0, 0.4))
            living.append(len(run.processes))
            run.start([])
        run.finish()
        run.check()
