"""Losses and gradients that are not finite: on all ranks alike, nothing changed, the state still good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.agreement import _device_reads
from tests.helpers import judged, max_diff, raises_text, same_bits, stepped
from tests.training.small import MEAN_SGD, product, step_of

X = torch.ones(2)


def _poisoned(batch: Tensor, pipeline: tx.Pipeline, loss: Callable[..., Any]) -> Any:
    step = fjoin.train_step(loss, pipeline)
    state = step.init({"w": torch.ones(2), "v": torch.ones(2)})
    before = state.clone()
    text = raises_text(fjoin.NonFinite, lambda: step(state, batch))
    assert same_bits(state.params, before.params) and same_bits(state.pipeline, before.pipeline)
    state, metrics = step(state, X)  # the same state, and the other ranks, continue
    return text, metrics.loss


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "hook", [tx.mean("data"), tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0))], ids=["mean", "clip"]
)
def test_a_loss_that_is_not_finite(hook: tx.Transform, bad: float) -> None:
    pipeline = tx.fuse(hook, tx.adamw(0.1))
    batches = [X, X, torch.tensor([1.0, bad])]
    for text, loss in tx.simulate(lambda b: _poisoned(b, pipeline, product), {"data": 3}, batches):
        assert "step 0" in text and "loss of rank 2 is not finite" in text and "'w'" in text and loss == 2.0


def test_a_gradient_that_is_not_finite_though_the_loss_is() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).sum() + torch.sqrt(params["v"] - batch).sum()

    ok = torch.zeros(2)
    for text, _ in tx.simulate(lambda b: _poisoned_sqrt(b, loss), {"data": 2}, [ok, X]):
        assert "the summed gradient of 'v' is not finite" in text and "rank" not in text.split(";")[0]


def _poisoned_sqrt(batch: Tensor, loss: Any) -> Any:
    step = fjoin.train_step(loss, MEAN_SGD)
    state = step.init({"w": torch.ones(2), "v": torch.ones(2)})
    text = raises_text(fjoin.NonFinite, lambda: step(state, batch))
    assert torch.equal(state.params["w"], torch.ones(2))
    return text, None


def test_a_window_that_is_not_finite_is_lost_whole() -> None:
    step, state = step_of(accumulate=3)
    state = stepped(step, state, (X, X))
    raises_text(fjoin.NonFinite, lambda: step(state, X * float("nan")))
    weights = []
    for _ in range(6):
        state, metrics = step(state, X)
        weights.append(metrics.weight if metrics.stepped else None)
    assert weights == [None, None, 3.0] * 2


def test_ranks_are_named_within_the_axes_that_are_reduced() -> None:
    def one_rank(batch: Tensor) -> Any:
        step = fjoin.train_step(
            product, tx.fuse(tx.mean("local"), tx.sgd(0.1)), mesh=fjoin.mesh({"node": 13, "local": 2})
        )
        state = step.init({"w": torch.ones(2), "v": torch.ones(2)}, sync=None)
        try:
            step(state, batch)
        except fjoin.NonFinite as error:
            return error.ranks
        return None

    out = tx.simulate(one_rank, {"node": 13, "local": 2}, [X] * 25 + [X * float("nan")])
    assert out == [None] * 24 + [(1,)] * 2


def test_a_failure_within_a_window_is_reported() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        if batch.sum() > 5:
            raise ValueError("bad batch")
        return product(params, batch)

    step, state = step_of(loss, accumulate=2)
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step(state, X * 9), "bad batch")
    raises_text(fjoin.TornState, lambda: step(state, X), "accumulation window")


def test_finite_values_with_an_overflowing_sum_are_accepted() -> None:
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum() * 1e-30, tx.fuse(tx.mean("data"), tx.sgd(1e-38)))
    state = step.init({"w": torch.ones(4)})
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.sgd(1e-38)))
    state = step.init({"w": torch.zeros(4)})
    state, _ = step(state, torch.full((4,), 3e38))
    assert torch.isfinite(state.params["w"]).all() and state.params["w"][0] < 0


@pytest.mark.parametrize("on_device", [False, True])
def test_finite_gradients_whose_squares_overflow_are_clipped(on_device: bool) -> None:
    """The device decides as the host does."""
    clipped = tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0))
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(clipped, tx.sgd(0.5)))
    state = step.init({"w": torch.zeros(4)})
    step.run.step_check.grads.on_device = on_device
    for _ in step.join([0]):
        state, metrics = step(state, torch.full((4,), 1e30))
    torch.testing.assert_close(state.params["w"], torch.full((4,), -0.25))
    assert metrics.as_dict()["grad_norm"] == pytest.approx(2e30)


def test_skip_if_nonfinite_leaves_the_step_out() -> None:
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    step, state = step_of(pipeline=pipeline)
    state, metrics = step(state, torch.tensor([1.0, float("nan")]))
    assert torch.equal(state.params["w"], torch.ones(2)) and state.pipeline.inner.optimizer["w"].step == 0
    assert state.pipeline.skipped == 1
    with fjoin.bind(fjoin.mesh({"data": -1})):
        pipeline.step(state.params, {k: torch.ones(2) for k in ("w", "v")}, state.pipeline)
    state, metrics = step(state, X)
    assert not torch.equal(state.params["w"], torch.ones(2)) and metrics.loss == 2.0


def test_nonfinite_step_on_a_device_changes_nothing_and_raises_later() -> None:
    """CPU tensors take the path of accelerators, on which the host does not wait."""
    for hook in (
        tx.mean("data"),
        tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
        tx.chain(tx.mean("data"), tx.clip_by_value(9.0)),
    ):
        step, state = step_of(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        step.run.step_check.grads.on_device = True
        reference, other = step_of(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        state, metrics = step(state, X)
        other, expected = reference(other, X)
        # A device computes the norm of a clip in float64 at once.
        assert max_diff(state.params, other.params) < 1e-7 and metrics.loss == expected.loss
        before = state.clone()
        state, metrics = step(state, torch.tensor([1.0, float("nan")]))
        assert same_bits(state.params, before.params)
        assert same_bits(state.pipeline.optimizer, before.pipeline.optimizer)
        assert metrics.loss != metrics.loss  # one rank may read it, and must not raise before the others
        state, _ = step(state, X)  # verdicts are read when they are one step old, on all ranks alike
        raises_text(fjoin.NonFinite, lambda: step(state, X), "step 1", "loss of rank 0")  # noqa: B023
        state, metrics = step(state, X)
        assert metrics.loss == metrics.loss and not same_bits(state.params, before.params)


LOCAL_HOOKS = {
    "some": lambda: tx.masked(tx.mean("data"), "w"),
    "sometimes": lambda: tx.switch_after(9, tx.masked(tx.mean("data"), "w"), tx.identity()),
    "by path": lambda: tx.partition({"w": tx.mean("data"), "*": tx.identity()}),
}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hook", LOCAL_HOOKS)
def test_ranks_with_local_gradients_agree_on_nonfinite_steps(hook: str, on_device: bool) -> None:
    """A gradient that is not finite on one rank alone is an error on all, and skipped by all."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).sum() + torch.sqrt(params["v"] - batch).sum()  # d/dv is infinite at v = batch

    def one_rank(batch: Tensor) -> Any:
        pipeline = tx.fuse(LOCAL_HOOKS[hook](), tx.sgd(0.1))
        step = judged(fjoin.train_step(loss, pipeline), on_device)
        state = step.init({"w": torch.ones(2), "v": torch.ones(2)})

        def run() -> None:
            nonlocal state
            state, _ = step(state, batch)
            step.close()  # where a device's verdict is read

        text = raises_text(fjoin.NonFinite, run, "a gradient of rank 1 is not finite")
        assert ("'v'" in text) == (bool(batch[0]) and not on_device)
        assert torch.equal(state.params["w"], torch.ones(2)) and torch.equal(state.params["v"], torch.ones(2))

        skipping = judged(fjoin.train_step(loss, tx.skip_if_nonfinite(pipeline)), on_device)
        state = skipping.init({"w": torch.ones(2), "v": torch.ones(2)})
        state, _ = skipping(state, batch)
        assert torch.equal(state.params["w"], torch.ones(2)) and state.pipeline.skipped == 1
        state, _ = skipping(state, batch * 0)
        return int(state.pipeline.skipped), torch.equal(state.params["v"], torch.ones(2))

    assert tx.simulate(one_rank, {"data": 3}, [torch.zeros(2), X, torch.zeros(2)]) == [(1, False)] * 3


@pytest.mark.parametrize("on_device", [False, True])
def test_host_counters_advance_in_steps_without_effect(on_device: bool) -> None:
    """They count all calls, in a skipped step as in the pure pipeline, and where no rank has weight."""
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.chain(tx.mean("data"), tx.every(2, tx.clip_by_value(1.0))), tx.sgd(0.1)))
    step = judged(fjoin.train_step(product, pipeline, weight=lambda b: float(b[1] != 0)), on_device)
    state = step.init({"w": torch.ones(2)})
    pure, params = pipeline.init({"w": torch.ones(2)}), {"w": torch.ones(2)}
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for batch in (X * float("nan"), X * 0, X):
            state, _ = step(state, batch)
            params, pure = pipeline.step(params, {"w": batch}, pure, weight=float(batch[1] != 0))
    assert state.pipeline.inner.hook[1].step == pure.inner.hook[1].step == 3


def test_a_lost_window_is_lost_for_a_state_that_was_kept() -> None:
    """With donate=False the state before the bad call can be used again: its window is empty."""
    step, state = step_of(accumulate=2, donate=False)
    middle, _ = step(state, X * float("nan"))
    raises_text(fjoin.NonFinite, lambda: step(middle, X))
    for _ in range(2):
        middle, metrics = step(middle, X)
    assert metrics.stepped and torch.allclose(middle.params["w"], torch.full((2,), 0.9))


def test_host_waits_for_skipped_steps(monkeypatch: Any) -> None:
    """While it waits for a device, the host checks for failed ranks, also in a pipeline that never raises."""
    waited: list[Any] = []
    monkeypatch.setattr(_device_reads, "_await", lambda mesh, event: waited.append(event))
    step, state = step_of(pipeline=tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.sgd(0.1))))
    step.run.step_check.grads.on_device = True
    for batch in (X, torch.tensor([1.0, float("nan")]), X):
        state, metrics = step(state, batch)
        before = len(waited)
        metrics.weight  # noqa: B018
        assert len(waited) > before
    assert metrics.stepped
