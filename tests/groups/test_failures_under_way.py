"""A rank that fails while parameters are under way first gives the others what it has begun to send."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.ranks import Ranks

Report = Callable[[Any], None]


def fail(rank: int, report: Report, transport: str, where: str) -> None:
    """Rank 1 fails in the fourth step, or beside it; all report what they can read then."""
    torch.set_num_threads(1)
    mesh = fjoin.mesh({"data": -1}, timeout_s=60, transport=transport)
    calls = 0

    def bad(place: str) -> None:
        if rank == 1 and calls == 4 and place == where:
            raise ValueError("bad batch")

    def loss_fn(params: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        bad("before the parameters are used")
        y = params["a"].sum() * batch.sum() * (rank + 1)
        bad("after the first use")
        return y + (params["b"] * batch.sum()).sum()

    pipeline = tx.zero(tx.mean("data"), tx.adamw(0.1), "data")
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, bucket_bytes=1000)
    state = step.init({"a": torch.ones(30001), "b": torch.ones(40003)})
    batches = [torch.ones(2)] * 8
    try:
        for _ in step.join(batches) if where == "the body of a loop" else batches:
            if where == "the body of a loop" and rank == 1 and calls == 3:
                raise ValueError("bad batch")
            state, _ = step(state, batches[0])
    except Exception as error:
        sums = [round(float(value.sum()), 3) for value in state.params.values()]
        report((type(error).__name__, state.step, sums, len(tx.to_state_dict(state.pipeline)) > 0))


PLACES = ["before the parameters are used", "after the first use", "the body of a loop"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("where", PLACES)
def test_the_state_of_the_last_step_can_be_read_on_all_ranks(where: str, transport: str) -> None:
    with Ranks(3, fail, transport, where) as run:
        found = sorted(run.next() for _ in range(3))
    kinds, steps, sums, read = zip(*(value for _, _, value in found), strict=True)
    assert kinds == ("PeerLost", "ValueError", "PeerLost")
    assert steps == (3, 3, 3) and all(read)
    assert sums[0] == sums[1] == sums[2]
    assert sums[0][0] < 30001 - 3 * 0.09 * 30001, "three steps of about 0.1"


KEPT: list[Any] = []


def fail_alone(rank: int, report: Report) -> None:
    """Rank 0 fails while a message is under way that no other rank takes part in."""
    torch.set_num_threads(1)
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    KEPT.append(mesh)  # on the other ranks beyond this function
    if rank == 0:
        mesh.reduce_(torch.ones(100_000), ("data",))
        time.sleep(0.5)  # until a thread of gloo has begun it
        begin = time.monotonic()
        try:
            with mesh:
                raise ValueError("bad batch")
        except ValueError:
            report(time.monotonic() - begin)


def test_failure_does_not_wait_for_pending_messages() -> None:
    with Ranks(3, fail_alone) as run:
        seconds = run.next()[2]
    assert seconds < 20, "it is the mesh's time-out otherwise"
