"""A loss function may return parameters in its aux and buffers: the step must not overwrite them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import seen_by
from tests.training.small import MEAN_SGD, step_of

ONE, ZERO = torch.ones(1), torch.zeros(1)


def distance(params: Any, batch: Any) -> torch.Tensor:
    return ((params["w"] - batch) ** 2).sum()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("donate", [True, False])
def test_buffers_are_copies_of_parameters_and_of_gradients(donate: bool, accumulate: int) -> None:
    """A copy of the parameters in every second step, kept in the others; and the gradients gathered so far in a window, to which
    the next call adds in place."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        n = int(buffers["n"])
        target = params["w"].detach() if n // accumulate % 2 == 0 else buffers["target"]
        grad = params["w"].grad
        return distance(params, batch), None, {"target": target, "n": buffers["n"] + 1, "grad": ZERO if grad is None else grad}  # fmt: skip

    buffers = {"target": ZERO, "n": torch.tensor(0), "grad": ZERO}
    step, state = step_of(loss_fn, MEAN_SGD, {"w": ZERO}, buffers, donate=donate, accumulate=accumulate)
    look = lambda state, _: (state.buffers["target"].item(), state.buffers["grad"].item())  # noqa: E731
    seen = seen_by(look, step, state, [ONE] * 6 * accumulate)[accumulate - 1 :: accumulate]
    assert [target for target, _ in seen] == pytest.approx([0.0, 0.0, 0.36, 0.36, 0.5904, 0.5904])
    assert seen[-1][1] == pytest.approx(-2 * (1 - 0.67232) * (accumulate - 1))


@pytest.mark.parametrize("donate", [True, False])
def test_aux_views_of_parameters_are_copied(donate: bool) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        w, other = params["w"], torch.ones(1)
        return distance(params, batch), {"own": other, "deep": [w, (w.detach().view(1, 1), {"plain": w[:1]})], "n": 3}

    step, state = step_of(loss_fn, params={"w": ZERO}, donate=donate)
    state, metrics = step(state, ONE)
    first, (second, third) = metrics.aux["deep"]
    assert [t.item() for t in (first, second, third["plain"])] == [0.0] * 3 and second.shape == (1, 1)
    assert state.params["w"].item() == pytest.approx(0.2)
    assert metrics.aux["n"] == 3 and not first.requires_grad


def test_aux_without_views_is_returned_unchanged() -> None:
    own = {"a": torch.ones(3), "b": [torch.zeros(1), "text"]}
    step, state = step_of(lambda p, b: (distance(p, b), own), params={"w": ZERO})
    _, metrics = step(state, ONE)
    assert metrics.aux is own
