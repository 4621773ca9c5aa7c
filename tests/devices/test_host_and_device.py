"""A device decides on a step as the host does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged


def stepped(pipeline: tx.Pipeline, slope: float, on_device: bool) -> Any:
    """The parameters after a step with this gradient, or the name of its error."""
    step = judged(fjoin.train_step(lambda p, batch: (p["w"] * batch).sum(), pipeline), on_device)
    state, _ = step(step.init({"w": torch.zeros(3)}), torch.full((3,), slope))
    try:
        step.close()
    except fjoin.NonFinite as error:
        return type(error).__name__
    return state.params["w"].tolist()


CLIPPED = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.sgd(1.0))


@pytest.mark.parametrize("slope", [0.5, 1e18, float("nan"), float("inf")])
def test_a_device_decides_as_the_host(slope: float) -> None:
    host: Any = None
    try:
        host = stepped(CLIPPED, slope, False)
    except fjoin.NonFinite as error:
        host = type(error).__name__
    assert stepped(CLIPPED, slope, True) == (host if isinstance(host, str) else pytest.approx(host))


def test_gradients_whose_squares_overflow_are_clipped_on_a_device_too() -> None:
    assert stepped(CLIPPED, 1e25, True) == pytest.approx(stepped(CLIPPED, 1e25, False))
