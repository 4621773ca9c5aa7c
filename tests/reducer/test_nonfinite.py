"""Losses and gradients that are not finite: on all ranks alike, nothing changed, the state still good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff, raises_text, same_bits
from tests.reducer.test_wire import CODECS
from tests.training.small import product, step_of

X = torch.ones(2)


def sqrt_loss(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).sum() + torch.sqrt(params["v"] - batch).sum()  # d/dv is infinite at v = batch


MEAN = tx.mean("data")
NORM = tx.chain(MEAN, tx.clip_by_global_norm(1.0))
# Hook, loss, the batches of three ranks, and words of the error.
POISONED: list[tuple[Any, ...]] = [
    *((hook, product, [X, X, torch.tensor([1.0, bad])], ["step 0", "loss of rank 2 is not finite", "'w'"])
      for hook in (MEAN, NORM, *(tx.compress(make(), MEAN) for make in CODECS.values())) for bad in (float("nan"), float("inf"))),
    (MEAN, sqrt_loss, [X * 0, X, X * 0], ["the summed gradient of 'v' is not finite"]),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", range(len(POISONED)))
def test_a_loss_or_a_gradient_that_is_not_finite(row: int) -> None:
    hook, loss, batches, words = POISONED[row]

    def one_rank(batch: Tensor) -> Any:
        step, state = step_of(loss, tx.fuse(hook, tx.adamw(0.1)))
        before = state.clone()
        text = raises_text(fjoin.NonFinite, lambda: step(state, batch), *words)
        assert same_bits(state.params, before.params) and same_bits(state.pipeline, before.pipeline)
        state, metrics = step(state, X * 0.5)  # the same state, and the other ranks, continue
        return text, metrics.loss

    for text, metric in tx.simulate(one_rank, {"data": 3}, batches):
        assert ("rank" in text.split(";")[0]) == (loss is product) and metric == float(loss({"w": X, "v": X}, X * 0.5))


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


@pytest.mark.parametrize("on_device", [False, True])
def test_finite_values_with_an_overflowing_sum_or_norm_are_accepted(on_device: bool) -> None:
    for hook, value, rate, want in ((MEAN, 3e38, 1e-38, -3.0), (NORM, 1e30, 0.5, -0.25)):
        step = judged(fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(rate))), on_device)
        state, metrics = step(step.init({"w": torch.zeros(4)}), torch.full((4,), value))
        step.close()
        assert state.params["w"].tolist() == pytest.approx([want] * 4)
        assert hook is MEAN or metrics.as_dict()["grad_norm"] == pytest.approx(2e30)


def test_nonfinite_step_on_a_device_changes_nothing_and_raises_later() -> None:
    """CPU tensors take the path of accelerators, on which the host does not wait."""
    for hook in (MEAN, NORM, tx.chain(MEAN, tx.clip_by_value(9.0))):
        step, state = step_of(pipeline=tx.fuse(hook, tx.adamw(0.1)))
        judged(step, True)
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
