"""How a loop over fjoin.join ends: for want of input or weight, or by a failure; left_loops.py has those that are left."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text


def test_weights_and_ends() -> None:
    def one_rank(weights: list[float]) -> Any:
        loop = fjoin.join(weights, weight=lambda w: w)
        return [(batch if loop.live else None, loop.total, loop.scale) for batch in loop]

    assert tx.simulate(one_rank, {"data": 2}, [[], []]) == [[], []]
    # Where no rank has weight the body does not run; a batch of weight 0 is not seen where another one can be.
    assert tx.simulate(one_rank, {"data": 2}, [[0.0, 3.0, 0.0, 1.0], [0.0, 2.0, 5.0]]) == [
        [(3.0, 5.0, 1.2), (3.0, 5.0, 0.0), (1.0, 1.0, 2.0)],
        [(2.0, 5.0, 0.8), (5.0, 5.0, 2.0), (None, 1.0, 0.0)],
    ]
    raises_text(ValueError, lambda: one_rank([-1.0]), "weight(batch)", "-1.0")
    raises_text(
        fjoin.NoBatch,
        lambda: tx.simulate(lambda b: [len(x) for x in fjoin.join(b)], {"data": 2}, [[[1]], []]),
        "empty=",
    )


def test_throwing_on_early_termination() -> None:
    def one_rank(n: int) -> tuple[int, str]:
        seen = 0
        try:
            for _ in fjoin.join(range(n), throw_on_early_termination=True):
                seen += 1
        except fjoin.EarlyTermination as error:
            return seen, str(error)
        return seen, ""

    for seen, text in tx.simulate(one_rank, {"data": 3}, [2, 3, 3]):
        assert seen == 2 and "1 of 3 ranks" in text and "iteration 2" in text


def test_one_loop_at_a_time_and_again() -> None:
    loop = fjoin.join([1, 2])
    running = iter(loop)
    next(running)
    raises_text(fjoin.JoinError, lambda: next(iter(loop)), "still running")
    del running
    assert list(loop) == [1, 2] and loop.batches == 2, "a second epoch"


def test_leaving_a_loop_on_one_rank_keeps_the_process_group(pool: Any) -> None:
    assert pool.run(1, leave_alone) == [True]


def leave_alone() -> bool:
    for _ in fjoin.join([1, 2]):
        break
    return dist.is_initialized()


def test_empty_replaces_a_first_batch_of_weight_zero() -> None:
    """`empty`, where given, takes the place of a first batch of weight 0, so no NaN enters."""

    def one_rank(first: float) -> list[float]:
        return [batch for batch in fjoin.join([first, 3.0], weight=lambda w: w, empty=7.0)]

    assert tx.simulate(one_rank, {"data": 2}, [0.0, 2.0]) == [[7.0, 3.0], [2.0, 3.0]]
