"""Beside a device that is behind its host a state is right or torn after any failure, and all ranks raise for NaN together."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.devices.late_runs import PIPELINES, STEPS, failing, nonfinite, reference

pytestmark = pytest.mark.gloo
Case = tuple[str, str, int, bool]
of_one_process = functools.cache(reference)


def failed(pool: Any, folder: Path, cases: list[Case], fault: str | None = None) -> list[str]:
    """What breaks the law, in words."""
    wrong = []
    for rank, results in enumerate(pool.run(2, failing, str(folder), cases, fault)):
        for case, (error, states) in zip(cases, results, strict=True):
            name, how, _, donate = case
            lost = {"CollectiveTimeout", "PeerLost"}
            if error not in (lost if rank == 0 or how == "sleeps" else {"ValueError"}):
                wrong.append(f"{case}: rank {rank} raised {error}")
            for i, seen in enumerate(states):
                want = of_one_process(name)[rank][i] if i <= STEPS else []
                near = len(seen) == len(want) and all(abs(a - b) < 1e-5 for a, b in zip(seen, want, strict=True))
                if seen not in ("TornState", "DonatedState") and not near:
                    wrong.append(f"{case}: state {i} of rank {rank} is neither right nor torn")
            if states[0] == "TornState" and not donate:
                wrong.append(f"{case}: the first state of rank {rank} is torn")
    return wrong


@pytest.mark.parametrize("name", PIPELINES)
def test_after_a_failure_a_state_is_right_or_torn(pool: Any, tmp_path: Path, name: str) -> None:
    assert "\n".join(failed(pool, tmp_path, [(name, "raises", 3, True), (name, "raises", 2, False)])) == ""


@pytest.mark.long
@pytest.mark.parametrize("name", PIPELINES)
def test_after_any_failure_a_state_is_right_or_torn(pool: Any, tmp_path: Path, name: str) -> None:
    cases = [
        (name, how, at, donate) for how, at, donate in itertools.product(("raises", "sleeps"), (1, 4), (True, False))
    ]
    assert "\n".join(failed(pool, tmp_path, cases)) == ""


def test_after_a_timeout_a_state_is_right_or_torn(pool: Any, tmp_path: Path) -> None:
    assert "\n".join(failed(pool, tmp_path, [("mean", "sleeps", 3, False)])) == ""


def test_states_of_steps_under_way_are_found(pool: Any, tmp_path: Path) -> None:
    """Where nothing marks the steps that the device has not ended."""
    wrong = failed(pool, tmp_path, [("mean", "raises", 3, False)], "settle")
    assert any("rank 0 is neither right nor torn" in line for line in wrong), wrong
    assert any("rank 1 is neither right nor torn" in line for line in wrong), wrong


def raised(pool: Any, cases: list[Any], fault: str | None = None) -> list[str]:
    """What breaks the law, in words."""
    wrong = []
    ranks = pool.run(2, nonfinite, cases, fault)
    for case, first, second in zip(cases, *ranks, strict=True):
        if first != second:
            wrong.append(f"{case}: the ranks differ: {first} and {second}")
        (error, calls, again), (_, _, at, reads) = first, case
        if reads == "leave":  # nothing reads the last decisions: the run is dropped
            error = ("NonFinite", at, *(error or ()))
        if error is None or error[:2] != ("NonFinite", at):
            wrong.append(f"{case}: the loop ended with {error}")
        if calls > at + 3:
            wrong.append(f"{case}: it ended only after {calls} calls")
        if again != 3 or (error is not None and len(error) > 2):
            wrong.append(f"{case}: the next run ended after {again} steps: {error}")
    return wrong


@pytest.mark.parametrize("reads", ["none", "all", "first", "close", "leave"])
def test_ranks_raise_for_nan_at_the_same_step(pool: Any, reads: str) -> None:
    steps = [STEPS - 2, STEPS - 1] + [1] * (reads != "leave")
    assert "\n".join(raised(pool, [(name, 1, at, reads) for name in ("mean", "fed back") for at in steps])) == ""


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        ("drain", ("mean", 1, STEPS - 2, "none"), "ended with None"),
        ("drain", ("mean", 1, STEPS - 1, "close"), "ended with None"),
        ("forget", ("mean", 1, STEPS - 2, "leave"), "the next run ended"),
        ("age", ("mean", 1, 1, "none"), "it ended only after 5 calls"),
    ],
)
def test_late_decisions_are_found(pool: Any, fault: str, case: Any, says: str) -> None:
    wrong = raised(pool, [case], fault)
    assert any(says in line for line in wrong), wrong
