"""A call that fails within an accumulation window: its gradients are lost, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, same_bits, stepped
from tests.training.small import step_of

X = torch.ones(2)


def loss(params: Any, batch: Tensor) -> Tensor:
    if batch.sum() > 5:
        raise ValueError("bad batch")
    return (params["w"] * batch).sum() + params["v"].sum()


ADAM = tx.fuse(tx.chain(tx.clip_by_value(0.5), tx.mean("data")), tx.adam(0.1))


@pytest.mark.parametrize("within", [1, 2], ids=["in the middle", "in the last call"])
def test_the_last_completed_step_can_be_read(within: int) -> None:
    step, state = step_of(loss, ADAM, accumulate=3)
    state = stepped(step, state, [X] * 3)
    whole, first = state.clone(), state
    state = stepped(step, state, [X] * within)
    raises_text(fjoin.DonatedState, lambda: first.params, "donated to step 1")
    assert state.batches == 3 + within
    raises_text(ValueError, lambda: step(state, X * 9), "bad batch")
    for left in (state, first):
        assert same_bits(left.params, whole.params) and same_bits(left.pipeline, whole.pipeline)
        assert (left.step, left.batches) == (1, 3)
    raises_text(fjoin.TornState, lambda: step(state, X), "accumulation window", "bad batch", "state.clone()")
    again = state.clone()
    assert same_bits(again.params, whole.params) and (again.step, again.batches) == (1, 3)
    for _ in range(3):  # a window of its own
        again, metrics = step(again, X)
        whole, _ = step(whole, X)
    assert metrics.stepped and metrics.weight == 3.0 and same_bits(again.params, whole.params)


@pytest.mark.parametrize("donate", [True, False])
def test_buffers_and_positions_are_those_of_the_last_completed_step(donate: bool) -> None:
    def counts(params: Any, buffers: Any, batch: Tensor) -> Any:
        return loss(params, batch), None, {"n": buffers["n"] + 1}

    step = fjoin.train_step(counts, ADAM, accumulate=2, donate=donate)
    state = stepped(step, step.init({"w": X, "v": X.clone()}, {"n": torch.tensor(0)}), [X] * 3)
    raises_text(ValueError, lambda: step(state, X * 9), "bad batch")
    if donate:
        assert (state.buffers["n"], state.batches, state.step) == (2, 2, 1)  # type: ignore[index]
    else:  # the state given is whole, with its open window
        assert (state.buffers["n"], state.batches, state.step) == (3, 3, 1)  # type: ignore[index]
        state, metrics = step(state, X)
        assert metrics.stepped and (state.batches, state.step) == (4, 2)


@pytest.mark.parametrize("donate", [True, False])
def test_a_window_that_is_not_finite_leaves_the_position_of_the_last_completed_step(donate: bool) -> None:
    step, state = step_of(loss, ADAM, accumulate=2, donate=donate)
    state = stepped(step, state, [X] * 3)
    raises_text(fjoin.NonFinite, lambda: step(state, X * float("nan")))
    assert (state.batches, state.step) == (2, 1)
    for _ in range(2):
        state, metrics = step(state, X)
    assert metrics.stepped and (state.batches, state.step) == (4, 2)


def fails_on_one_rank() -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=30)
    step = fjoin.train_step(loss, ADAM, mesh=mesh, accumulate=2)
    state = stepped(step, step.init({"w": X, "v": X.clone()}), [X] * 3)
    try:
        for _ in range(3):
            state, _ = step(state, X * (9 if mesh.rank == 0 else 1))
        kind = "nothing"
    except (ValueError, fjoin.PeerLost) as error:
        kind = type(error).__name__
    again = raises_text(fjoin.FjoinError, lambda: step(state, X), "cannot go on")
    return kind, again, state.clone().params, state.step, state.batches


def test_also_on_ranks_that_lose_a_peer(pool: Any) -> None:
    (kind, _, here, *counts), (other, again, there, *others) = pool.run(2, fails_on_one_rank)
    assert (kind, other) == ("ValueError", "PeerLost") and "bad batch" in again
    assert same_bits(here, there) and counts == others == [1, 2]
