"""How a loop over fjoin.join ends: for want of input or weight, or by a failure; left_loops.py has those that are left."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from fjoin.uneven import _loop
from tests.helpers import raises_text
from tests.ranks import Ranks
from tests.uneven.loop_problem import make_model


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


def leave(rank: int, report: Any, how: str) -> None:
    """Rank 1 fails in its loader, and stays alive, or is killed; the time-out is 300 s."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=300)

    def loader() -> Any:
        for i in range(4):
            if how == "loader" and rank == 1 and i == 2:
                report("leaving")
                raise ValueError("bad file")
            yield i

    loop = fjoin.join(loader(), mesh=mesh)
    try:
        with fjoin.bind(mesh):
            for i in loop:
                if rank == 1 and i == 1 and how == "kill":
                    report("leaving")
                    os.kill(os.getpid(), signal.SIGKILL)
                tx.psum(torch.ones(2), "data")
    except Exception as error:
        report((type(error).__name__, str(error)))
    else:
        report(("fine", ""))


@pytest.mark.parametrize("how", ["loader", "kill"])
def test_a_failure_is_an_error_on_all_ranks(how: str) -> None:
    with Ranks(3, leave, how) as run:
        for rank, seconds, (kind, text) in run.after("leaving", 2 if how == "kill" else 3):
            if rank == 1:
                assert kind == "ValueError"
            elif how == "kill":
                assert kind == "PeerLost" and "left the loop" not in text, text
            else:
                assert kind == "PeerLost" and "ValueError: bad file" in text, (kind, text)
                assert seconds < 10.0


def leave_and_go_on(rank: int, report: Any) -> None:
    """Rank 1 leaves its first loop alone and begins a second one, over the default group; the time-out is 300 s."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    try:
        for epoch in range(2):
            for i in fjoin.join(range(4)):
                if (rank, epoch, i) == (1, 0, 1):
                    report("leaving")
                    break
    except Exception as error:
        report((type(error).__name__, str(error)))


def test_after_a_failure_no_loop_makes_the_default_group_again() -> None:
    with Ranks(2, leave_and_go_on) as run:
        for rank, seconds, (kind, text) in run.after("leaving", 2):
            assert kind == ("JoinError" if rank == 1 else "PeerLost") and "left the loop" in text
            assert seconds < 10.0


def fail_around_a_module(rank: int, report: Any) -> None:
    """Rank 1 fails while a DistributedDataParallel of its own has messages under way, and stays alive; the time-out is 300 s."""
    _loop._TOGETHER_S = 2.0  # the others wait in the module's messages, and see nothing
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    ddp = DistributedDataParallel(make_model())
    try:
        for i in fjoin.join(range(4)):
            if (rank, i) == (1, 1):
                report("leaving")
                raise ValueError("bad batch")
            ddp(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    except Exception as error:
        report((type(error).__name__, str(error)))


def test_module_does_not_delay_errors_on_other_ranks() -> None:
    """The module also releases the group that the loop takes down. Messages that wait in it get gloo's own error."""
    with Ranks(3, fail_around_a_module) as run:
        for rank, seconds, (kind, text) in run.after("leaving", 3):
            assert kind == "ValueError" if rank == 1 else kind in ("PeerLost", "RuntimeError"), (kind, text)
            assert seconds < 10.0


def test_empty_replaces_a_first_batch_of_weight_zero() -> None:
    """`empty`, where given, takes the place of a first batch of weight 0, so no NaN enters."""

    def one_rank(first: float) -> list[float]:
        return [batch for batch in fjoin.join([first, 3.0], weight=lambda w: w, empty=7.0)]

    assert tx.simulate(one_rank, {"data": 2}, [0.0, 2.0]) == [[7.0, 3.0], [2.0, 3.0]]
