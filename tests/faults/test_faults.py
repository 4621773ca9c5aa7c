"""A seeded plan of faults: no rank hangs, every error has a type of fjoin, and states stay equal on all ranks."""

from __future__ import annotations

import statistics

import pytest

from .outcomes import inflict, problems, times_of_notice
from .plan import Fault, plan


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(50) if seed != 1)])
def test_a_plan_of_faults(seed: int) -> None:
    wrong, noticed, hits = [], [], 0
    for fault in plan(seed, 9):
        outcome = inflict(fault)
        hits += outcome.hit
        wrong += [f"{fault}: {problem}" for problem in problems(fault, outcome)]
        noticed += times_of_notice(fault, outcome)
    assert not wrong, "\n".join(wrong)
    assert hits >= 7
    assert statistics.median(noticed) < 3.0 and max(noticed) < 10.0, f"noticed after {sorted(noticed)} s"


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_the_host_of_the_store_dies_while_others_make_their_mesh(transport: str) -> None:
    fault = Fault("kill", "train_step", "before init", 0, 1, 4, "mean", 1, True, 30.0, transport)
    for _ in range(3):
        assert not problems(fault, inflict(fault))
