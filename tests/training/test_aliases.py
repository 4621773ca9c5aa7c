"""A loss function may return parameters as its aux: the step must not overwrite them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import stepped

ALL_WAYS = pytest.mark.parametrize("donate", [True, False])


def distance(params: Any, batch: Any) -> torch.Tensor:
    return ((params["w"] - batch) ** 2).sum()


@ALL_WAYS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_target_network_is_a_copy(donate: bool, accumulate: int) -> None:
    """A buffer that is a copy of the parameters in every second step, and is kept in the others."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        n = int(buffers["n"])
        target = params["w"].detach() if n // accumulate % 2 == 0 else buffers["target"]
        return distance(params, batch), None, {"target": target, "n": buffers["n"] + 1}

    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))
    step = fjoin.train_step(loss_fn, pipeline, donate=donate, accumulate=accumulate)
    state = step.init({"w": torch.zeros(1)}, {"target": torch.zeros(1), "n": torch.tensor(0)})
    seen = []
    for _ in range(6 * accumulate):
        state, metrics = step(state, torch.ones(1))
        if metrics.stepped:
            seen.append(state.buffers["target"].item())  # type: ignore[index]
    assert seen == pytest.approx([0.0, 0.0, 0.36, 0.36, 0.5904, 0.5904])


@ALL_WAYS
def test_aux_views_of_parameters_are_copied(donate: bool) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        w, other = params["w"], torch.ones(1)
        return distance(params, batch), {"own": other, "deep": [w, (w.detach().view(1, 1), {"plain": w[:1]})], "n": 3}

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), donate=donate)
    state, metrics = step(step.init({"w": torch.zeros(1)}), torch.ones(1))
    first, (second, third) = metrics.aux["deep"]
    assert [t.item() for t in (first, second, third["plain"])] == [0.0] * 3 and second.shape == (1, 1)
    assert state.params["w"].item() == pytest.approx(0.2)
    assert metrics.aux["n"] == 3 and not first.requires_grad


def test_aux_without_views_is_returned_unchanged() -> None:
    own = {"a": torch.ones(3), "b": [torch.zeros(1), "text"]}
    step = fjoin.train_step(lambda p, b: (distance(p, b), own), tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    _, metrics = step(step.init({"w": torch.zeros(1)}), torch.ones(1))
    assert metrics.aux is own


@ALL_WAYS
def test_a_buffer_of_the_gradients_gathered_so_far_is_a_copy(donate: bool) -> None:
    """Within a window gradients are added in place at the leaves."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        grad = params["w"].grad
        return (params["w"] * batch).sum(), None, {"seen": buffers["seen"] if grad is None else grad}

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2, donate=donate)
    state = step.init({"w": torch.zeros(1)}, {"seen": torch.zeros(1)})
    state = stepped(step, state, (torch.tensor([batch]) for batch in (3.0, 5.0)))
    assert state.buffers["seen"].item() == 3.0  # type: ignore[index]
