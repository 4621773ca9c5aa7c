"""A seeded plan of faults: no rank hangs, every error has a type of fjoin, and states stay equal on all ranks."""

from __future__ import annotations

import statistics

import pytest

import fjoin

from .faulty_run import Fault, plan
from .outcomes import inflict, problems, times_of_notice


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


LOST, LATE = fjoin.PeerLost, fjoin.CollectiveTimeout
RAISES = "rank {rank} failed in step {step}: ValueError: injected"
DIES = "lost the connection to rank {rank}"
LEAVES = "rank {rank} left the loop over step.join in iteration {step}"


def row(
    event: str, place: str, rank: int, step: int, ranks: int, program: str = "train_step", timeout_s: float = 300.0,
    transport: str = "gloo", child: bool = False,
) -> Fault:  # fmt: skip
    return Fault(event, program, place, rank, step, ranks, "mean", 1, True, timeout_s, transport, child)


# A fault, the type and words of the errors of the other ranks, and the seconds after which they have them.
# No process ends before its test, so that a rank that has raised is noticed by its report alone.
TABLE = [
    *((row("exception", "loss", *at), LOST, RAISES, 10) for at in ((1, 0, 2), (0, 2, 3))),
    *((row("exception", "loss", *at, child=True), LOST, RAISES, 10) for at in ((1, 2, 2), (0, 2, 3))),
    (row("exception", "backward", 0, 1, 3), LOST, RAISES, 10),
    (row("exception", "evaluate", 1, 4, 3), LOST, "rank 1 failed: ValueError: injected", 10),
    (row("exception", "loader", 1, 2, 3, "pipeline.step"), LOST, "ValueError: injected", 10),
    (row("exception", "loss", 1, 2, 3, "fjoin.Join"), LOST, "ValueError: injected", 10),
    (row("kill", "body", 1, 2, 3, "pipeline.step"), LOST, DIES, 30),
    (row("exception", "body", 1, 2, 2), LOST, LEAVES, 10),
    (row("interrupt", "body", 1, 2, 2), LOST, "an interrupt", 10),
    (row("interrupt", "evaluate", 1, 4, 3), LOST, "KeyboardInterrupt", 10),
    (row("break", "body", 1, 2, 2), LOST, LEAVES, 10),
    (row("step twice", "body", 1, 2, 2), LOST, "called the step twice in iteration 2", 10),
    *((row("kill", "loss", *at), LOST, DIES, 4) for at in ((1, 2, 2), (0, 2, 2), (2, 2, 3))),
    (row("kill", "loss", 1, 2, 2, child=True), LOST, DIES, 10),
    *((row("kill", "loss", 1, 2, ranks, transport="shared", child=True), LOST, DIES, 10) for ranks in (2, 3)),
    *(
        (row("kill", place, 1, step, 3), LOST, DIES, 10)
        for place, step in (("before init", 0), ("loss", 0), ("evaluate", 4))
    ),
    *((row("kill", "loss", 1, 3, 2, "ddp.register", transport=of), LOST, "", 10) for of in ("gloo", "auto")),
    *((row("stop", "loss", 1, 2, 2, timeout_s=3.0, transport=of), LATE, "", 6) for of in ("gloo", "shared")),
    # Rank 0 hosts the store, for whose answers clients wait without a time-out.
    *((row("stop", place, 0, 0, 3, timeout_s=2.0), LATE, "within 2 s", 10) for place in ("before init", "loss")),
    *((row("stop", "loss", 1, 3, 2, "ddp.register", 2.0, of), LATE, "", 10) for of in ("gloo", "auto")),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "kind", "words", "seconds"), TABLE, ids=lambda v: f"{v.kind} {v.place}" if isinstance(v, Fault) else ""
)
def test_the_other_ranks_raise(fault: Fault, kind: type[Exception], words: str, seconds: float) -> None:
    outcome = inflict(fault)
    assert outcome.hit and problems(fault, outcome) == []
    for rank, end in outcome.ends.items():
        if rank != fault.rank:
            assert end.kind is kind and words.format(rank=fault.rank, step=fault.step) in end.text, (rank, end)
            assert end.rank in (None, fault.rank) if kind is LATE else end.rank == fault.rank, (rank, end)
            assert (0.5 * fault.timeout_s if kind is LATE else 0.0) < end.seconds < seconds, (rank, end)
            if fault.program == "train_step" and fault.place in ("loss", "backward"):
                assert (end.step, len(end.digests)) == (fault.step, fault.step), (rank, end)
