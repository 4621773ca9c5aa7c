"""The choice between two states where only a device knows which, with never three states in memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fjoin.transforms.base.trees import choose_state
from tests.devices.fake_device import CountingDevice


class State(NamedTuple):
    step: int
    sums: dict[str, Tensor]
    errors: list[Tensor]


def states(value: float, step: int) -> State:
    sums = {name: torch.tensor(value + i, dtype=torch.float64) for i, name in enumerate("abc")}
    return State(step, sums, [torch.full((100,), value) for _ in range(2)])


@pytest.mark.parametrize("fine", [True, False])
def test_every_tensor_is_chosen_and_nan_stays_where_it_is(fine: bool) -> None:
    new, old = states(math.nan, 8), states(1.0, 7)
    got = choose_state(torch.tensor(fine), new, old)
    want = new if fine else old
    assert got.step == 8, "host counters count calls"
    assert all(torch.equal(got.sums[name], want.sums[name]) or fine for name in "abc")
    assert all(g.isnan().all() == fine for g in [*got.sums.values(), *got.errors])


def test_a_state_from_a_function_is_freed_as_it_is_chosen() -> None:
    leaves, size = 8, 4096
    with CountingDevice() as memory:
        old = [torch.ones(size) for _ in range(leaves)]

        def peak(given_up: bool) -> float:
            def make() -> list[Tensor]:
                return [torch.ones(size) for _ in range(leaves)]

            new: Any = make if given_up else make()
            memory.reset()
            choose_state(torch.tensor(True), new, old)
            return memory.peak / (4 * size * leaves)

        assert peak(False) == pytest.approx(3.0, abs=0.01), "the old, the new and the chosen state"
        assert peak(True) == pytest.approx(2.0 + 1 / leaves, abs=0.01)
