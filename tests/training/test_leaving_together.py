"""Loops that all ranks leave after the same step, as by max_steps or early stopping: no failure; one rank alone is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import stepped
from tests.pool import Pool

BATCH = torch.tensor([1.0, 2.0])
TRANSPORTS = ["gloo", "shared"]


def _loss(params: Any, batch: Any) -> Any:
    return ((params["w"] * batch).sum() - 1) ** 2


class Bar:
    """Iterates over a loop as progress bars do, by a generator of its own."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def __iter__(self) -> Iterator[Any]:
        for batch in enumerate(self.loop):
            yield batch[1]


def _run(how: str, stops: list[int], mesh: Any, kept: list[Any]) -> Any:
    """Train until this rank's stop; then evaluate, and train one more epoch. Returns steps and parameters."""
    stop = stops[mesh.rank]
    step = fjoin.train_step(
        _loss, tx.fuse(tx.mean("data"), tx.adam(0.1)), mesh=mesh, accumulate=2 if how == "window" else 1
    )
    state = step.init({"w": torch.zeros(2)})
    loader = itertools.repeat(BATCH, 6) if how == "uneven" and mesh.rank else itertools.repeat(BATCH)
    loop: Any = fjoin.join(loader, steps=[step]) if how == "steps" else step.join(loader)
    if how == "a bar":
        loop = Bar(loop)
    elif how == "kept":
        kept.append(loop)

    def train() -> None:
        nonlocal state
        for batch in loop:
            if how == "before" and state.step == stop:
                return
            state, metrics = step(state, batch)
            if how == "window":
                if state.batches == 2 * stop + 1:
                    break
            elif how != "before" and state.step == stop:
                break

    train()
    found = fjoin.evaluate(lambda batch: {"loss": _loss(state.params, batch)}, [BATCH] * (mesh.rank + 1), mesh=mesh)
    if how != "window":
        state = stepped(step, state, step.join([BATCH] * (2 - mesh.rank)))
    return state.step, state.params["w"].tolist(), found.batches


HOW = ["break", "before", "a bar", "steps", "kept", "uneven", "window"]


def on_ranks(how: Any, stops: Any, transport: Any) -> Any:
    mesh = fjoin.mesh({"data": -1}, transport=transport, timeout_s=60)
    try:
        return _run(how, stops, mesh, [])
    except fjoin.FjoinError as error:
        return type(error).__name__, str(error)


@pytest.mark.sample(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", HOW)
def test_all_ranks_leave_after_the_same_step(pool: Pool, how: str, transport: str) -> None:
    results = pool.run(3, on_ranks, how, [5, 5, 5], transport)
    assert all(one == results[0] for one in results)
    assert results[0][0] == (5 if how == "window" else 7) and results[0][2] == 6


@pytest.mark.sample(5)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["break", "before", "a bar", "steps"])
@pytest.mark.parametrize("stops", [[5, 10**6], [5, 6], [6, 5]], ids=str)
def test_one_rank_alone_is_a_failure(pool: Pool, how: str, stops: list[int], transport: str) -> None:
    early = stops.index(5)
    results = pool.run(2, on_ranks, how, stops, transport)
    kind, text = results[1 - early]
    assert kind == "PeerLost" and f"rank {early} left the loop over" in text and "others have not" in text
    assert "stop()" in text
    assert results[early][0] in ("JoinError", "PeerLost"), "this rank learns of it at its next use of the mesh"


@pytest.mark.parametrize("early", [0, 1])
def test_one_rank_leaves_before_its_first_step(pool: Pool, early: int) -> None:
    stops = [10**6, 10**6]
    stops[early] = 0
    results = pool.run(2, on_ranks, "before", stops, "auto")
    kind, text = results[1 - early]
    assert kind == "PeerLost" and f"rank {early} left the loop over" in text and "stop()" in text


def test_simulated_ranks_leave_together() -> None:
    def rank() -> Any:
        return _run("break", [5, 5], fjoin.mesh({"data": -1}), [])

    a, b = tx.simulate(rank, {"data": 2})
    assert a == b and a[0] == 7
    with pytest.raises(tx.CollectiveMismatch):
        tx.simulate(lambda: _run("break", [5, 6], fjoin.mesh({"data": -1}), []), {"data": 2})


def custom(stops: Any, transport: Any) -> Any:
    """A loop of one's own over fjoin.join, with collectives in its body."""
    mesh = fjoin.mesh({"data": -1}, transport=transport, timeout_s=60)
    total, loop = torch.zeros(1), fjoin.join(itertools.count(), mesh=mesh)
    try:
        with fjoin.bind(mesh):
            for i in loop:
                total += tx.psum(torch.ones(1), "data")
                if i == stops[mesh.rank]:
                    break
            total += tx.psum(torch.ones(1), "data")
            for _ in fjoin.join(range(2), mesh=mesh):
                total += tx.psum(torch.ones(1), "data")
    except fjoin.FjoinError as error:
        return str(error)
    return total.item()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_custom_loop(pool: Pool, transport: str) -> None:
    assert pool.run(2, custom, [3, 3], transport) == [14.0, 14.0]
    first, second = pool.run(2, custom, [3, 9], transport)
    assert "rank 0 left the loop over fjoin.join in iteration 3" in second and "taken down" in first
