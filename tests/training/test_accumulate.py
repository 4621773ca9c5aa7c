"""Accumulation windows: one step on all their batches; and what is left of one in which a call fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits, seen_by, stepped
from tests.oracle.whole_batch import make_batches, make_model, parameters
from tests.training.small import MEAN_SGD, step_of


def together(batches: list[Any]) -> Any:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


BATCHES = make_batches(3, [[3, 2, 4, 1, 2, 5, 3], [5, 1, 2, 2], []])
HOOKS = {
    "mean": tx.mean("data"), "of a leaf": tx.chain(tx.stateless(lambda g: g * 1.0), tx.mean("data")),
    "left out": tx.skip_if_nonfinite(tx.mean("data")), "clipped": tx.chain(tx.clip_by_global_norm(0.05), tx.mean("data")),
    "noop": tx.identity(), "live": tx.mean("data", over="live"), "world": tx.mean("data", over="world"),
}  # fmt: skip


def trained(batches: list[Any], pipeline: tx.Pipeline, accumulate: int) -> tuple[Any, Any, list[float], int]:
    """This rank's parameters, its optimizer's state, the losses step by step, and the calls."""
    apply, params, _ = fjoin.functional(make_model())
    loss = lambda p, b: torch.nn.functional.cross_entropy(apply(p, {}, b[0]), b[1])  # noqa: E731
    step, state = step_of(loss, pipeline, params, weight=lambda b: len(b[1]), accumulate=accumulate)
    seen = []
    for batch in step.join(batches):
        state, metrics = step(state, batch)
        assert metrics.stepped or metrics.loss != metrics.loss, "a call within a window reports no loss"
        seen.append(metrics.loss if metrics.stepped else None)
    state = state.clone()
    return state.params, state.pipeline.optimizer, [loss for loss in seen if loss is not None], len(seen)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_accumulation_is_one_step_on_the_window(hook: str, window: int) -> None:
    """Any hook is given the mean of the window. The last windows are incomplete."""
    pipeline = tx.fuse(HOOKS[hook], tx.adamw(0.05))
    start = parameters(make_model())

    def run(given: Any, window: int) -> Any:
        return tx.simulate(lambda own: trained(own, pipeline, window), {"data": 3}, given)

    whole = [[together(own[i : i + window]) for i in range(0, len(own), window)] for own in BATCHES]
    ranks = run(BATCHES, window)
    assert hook == "noop" or all(same_bits(other[:3], ranks[0][:3]) for other in ranks), "optimizers too, to the bit"
    for (params, _, losses, calls), (want, *_) in zip(ranks, run(whole, 1), strict=True):
        assert calls == -(-7 // window) * window and len(losses) == -(-7 // window)
        moved = {path: p - start[path] for path, p in params.items()}
        assert max_diff(moved, {path: p - start[path] for path, p in want.items()}) < 1e-12
        assert hook == "noop" or moved["0.weight"].abs().max() > 1e-3


X = torch.ones(2)


# -- a call that fails within a window: its gradients are lost, and nothing else ------------------------


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
@pytest.mark.parametrize("how", ["raises", "is not finite"])
def test_buffers_and_positions_are_those_of_the_last_completed_step(how: str, donate: bool) -> None:
    def counts(params: Any, buffers: Any, batch: Tensor) -> Any:
        return loss(params, batch), None, {"n": buffers["n"] + 1}

    step = fjoin.train_step(counts, ADAM, accumulate=2, donate=donate)
    state = stepped(step, step.init({"w": X, "v": X.clone()}, {"n": torch.tensor(0)}), [X] * 3)
    if how == "raises":
        raises_text(ValueError, lambda: step(state, X * 9), "bad batch")
    else:
        raises_text(fjoin.NonFinite, lambda: step(state, X * float("nan")))
    open_window = how == "raises" and not donate  # the state given is whole
    assert (state.buffers["n"], state.batches, state.step) == ((3, 3, 1) if open_window else (2, 2, 1))  # type: ignore[index]
    if how == "raises" and donate:
        return
    for _ in range(1 if open_window else 2):
        state, metrics = step(state, X)
    assert metrics.stepped and metrics.weight == 2 and (state.batches, state.step) == (4, 2)


def test_a_window_whose_first_call_is_not_finite_is_lost_whole() -> None:
    step, state = step_of(pipeline=MEAN_SGD, accumulate=3)
    state = stepped(step, state, (X * float("nan"), X))
    raises_text(fjoin.NonFinite, lambda: step(state, X))
    look = lambda state, metrics: (metrics.stepped and metrics.weight, float(state.params["w"][0]))  # noqa: E731
    weights, values = zip(*seen_by(look, step, state, [X] * 6), strict=True)
    assert weights == (False, False, 3.0) * 2 and values[-1] == pytest.approx(0.8)
