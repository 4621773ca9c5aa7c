"""A pipeline comes to the same in all places: pure, in a train_step, with a module, in loops, and in one process on all batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests import problem
from tests.helpers import max_diff, same_bits
from tests.places import ON_RANKS, PLACES, Seen, run
from tests.rows import ROWS, Row

ENDING = ("join", "loop", "real loop", "Join")  # places in which a rank's input ends
# Rows that a module's own backward pass cannot serve, and why.
NOT_IN_A_MODULE = {"mean, buffers": "a module has buffers of its own"}
# A module's mean over the world sends nothing but gradients, so no rank learns that none has input.
OVER_THE_WORLD = ("mean over the world", "world")


def moved(seen: Seen, at: int = -1) -> dict[str, Any]:
    """Path -> displacement; a module leaves a parameter unchanged that no rank has used."""
    start = problem.start(seen.params[at]["scale"].dtype)
    return {path: p - start[path] for path, p in seen.params[at].items() if path != "unused"}


def check(name: str, place: str, sizes: str, pool: Any = None) -> None:
    row = ROWS[name]
    want, got = run(name, "pure", sizes), run(name, place, sizes, pool)
    if place == "one process":
        got = got * len(want)
    most = max(float(p.abs().max()) for one in want for p in moved(one).values())
    assert most > max(1e-3, 3 * row.tolerance), "a wrong result would pass"
    for mine, other in zip(got, want, strict=True):
        each = range(problem.STEPS) if len(mine.params) == len(other.params) else (-1,)
        apart = {step: max_diff(moved(mine, step), moved(other, step)) for step in each}
        assert all(one <= row.tolerance for one in apart.values()), f"apart from the pure pipeline by step: {apart}"


def in_places(*places: str) -> list[Any]:
    return [
        pytest.param(
            name, place, sizes, marks=pytest.mark.gloo if place in ("real", "module", "real loop", "Join") else ()
        )
        for place in places
        for name, row in ROWS.items()
        for sizes in (("ended",) if place in ENDING else problem.SIZES)
        if (place != "one process" or row.whole)
        and not (place in ("module", "Join") and name in NOT_IN_A_MODULE)
        and not (place == "module" and sizes == "no input" and name in OVER_THE_WORLD)
        and not (sizes == "poisoned" and (place == "one process" or row.loss == "buffered"))
        and not (place in ("loop", "real loop") and row.loss == "buffered")
    ]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("name", "place", "sizes"), in_places(*(p for p in PLACES[2:] if p not in ON_RANKS), PLACES[0]))  # fmt: skip
def test_in_one_process(name: str, place: str, sizes: str) -> None:
    check(name, place, sizes)


@pytest.mark.sample(20)
@pytest.mark.parametrize(("name", "place", "sizes"), in_places(*ON_RANKS))
def test_on_real_ranks(pool: Any, name: str, place: str, sizes: str) -> None:
    check(name, place, sizes, pool)


def test_ranks_are_equal_to_the_bit(pool: Any) -> None:
    for place in ("simulated", "real", "module"):
        first, *others = run("mean, Adam", place, "uneven", pool)
        assert all(same_bits(first.params, other.params) for other in others)


def test_a_plain_mean_sends_its_buckets_and_no_more(pool: Any) -> None:
    for seen in run("mean", "real", "uneven", pool, bucket_bytes=10**6):
        assert [len(messages) for messages in seen.messages] == [1] * problem.STEPS
    for seen in run("mean", "simulated", "uneven"):
        assert seen.messages == [[]] * problem.STEPS


def test_metrics_are_those_of_all_samples() -> None:
    (whole,) = run("mean", "one process", "uneven")
    for seen in run("mean", "simulated", "uneven"):
        params = [problem.start(), *whole.params[:-1]]
        for step, (loss, weight) in enumerate(seen.metrics):
            batch = problem.whole_batch("uneven", 3, step)
            assert weight == batch[1] and loss == pytest.approx(float(problem.net(params[step], batch)), abs=1e-12)


def test_the_law_notices_a_stage_with_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def scaled(grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return grad * (1 + len(calls) % 7)

    row = Row(lambda: tx.fuse(tx.chain(tx.mean("data"), tx.stateless(scaled)), tx.sgd(0.1)))
    monkeypatch.setitem(ROWS, "impure", row)
    with pytest.raises(AssertionError, match="apart from the pure pipeline"):
        check("impure", "simulated", "even")
