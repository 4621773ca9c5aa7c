"""Averages of parameters: states and values that do not fit, and 16 bits. tests/transforms/test_laws.py has their laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

MOMENTUM = tx.sgd(0.1, momentum=0.9)
PIPELINES = {
    "outer": tx.diloco(MOMENTUM, tx.mean("data"), 1),
    "chain": tx.fuse(tx.identity(), MOMENTUM, after=tx.chain(tx.every(1, tx.average_parameters("data"), first=0), tx.ema(0.5))),
    "parts": tx.fuse(tx.identity(), MOMENTUM, after=tx.partition({"w": tx.every(1, tx.average_parameters("data"), first=0)})),
    "state": tx.local_sgd(MOMENTUM, tx.mean("data"), 1, state="average"),
    "skips": tx.skip_if_nonfinite(tx.local_sgd(MOMENTUM, tx.mean("data"), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_states_and_parameters_that_do_not_fit(name: str) -> None:
    """`step` and `flush` raise the same errors."""
    pipeline, p = PIPELINES[name], {"w": torch.zeros(2)}
    state = pipeline.init(p)
    with fjoin.bind(fjoin.mesh({"data": 1})):
        for given in (3, None, (), p):
            raises_text(ValueError, lambda: pipeline.step(p, p, given), "state is a", "init or step returned")  # noqa: B023
            raises_text(ValueError, lambda: pipeline.flush(p, given), "state is a", "init or step returned")  # noqa: B023
        other: Any
        for other in {"x": torch.zeros(2)}, [torch.zeros(2)]:
            raises_text(ValueError, lambda: pipeline.step(other, other, state), "state does not fit params")  # noqa: B023
            raises_text(ValueError, lambda: pipeline.flush(other, state), "state does not fit params")  # noqa: B023
        raises_text(ValueError, lambda: pipeline.flush({"w": torch.zeros(3)}, state), "state['w'].momentum", "(3,)")
        raises_text(TypeError, lambda: pipeline.flush(3, state), "expected a tensor")
        if name != "skips":
            foreign = state._replace(optimizer=tx.adam().init(p))
            raises_text(ValueError, lambda: pipeline.flush(p, foreign), "state['w'] is a AdamState")


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_anchor_gathers_small_changes(dtype: torch.dtype, delay: int) -> None:
    """One of four ranks moves by 2 in each step; bfloat16 has steps of 2 above 256, and of 1 below."""
    pipeline = tx.diloco(tx.sgd(1.0), tx.mean("data"), 1 + delay, outer=tx.sgd(1.0), delay=delay)

    def one_rank(rank: int) -> float:
        p: Any = {"w": torch.full((1,), 256.0, dtype=dtype)}
        state = pipeline.init(p)
        for step in range(40):
            live = step % 2 == 1 or not delay  # a message with a delay replaces what is trained meanwhile
            grads = {"w": torch.full((1,), 2.0 * live * (rank == 0), dtype=dtype)}
            p, state = pipeline.step(p, grads, state, weight=1.0)
        return pipeline.flush(p, state)[0]["w"].item()

    assert tx.simulate(one_rank, {"data": 4}, list(range(4))) == [246.0 if delay else 236.0] * 4


def test_a_period_that_another_average_serves_ends_too() -> None:
    part, values = tx.every(1, tx.average_parameters("data"), first=0, except_every=2), {"w": torch.ones(2)}

    def one_rank() -> list[float]:
        state, seen = part.init(values), []
        for step in range(4):
            _, state = part.update(values, state, values, weight=2.0, step=step, persistent=True)
            seen.append(float(state.weight))
        return seen

    assert tx.simulate(one_rank, {"data": 2}) == [[0.0] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("after", [tx.average_parameters("data"), tx.outer_step(tx.mean("data"), tx.sgd(1.0))])
def test_sixteen_bits(after: tx.Transform, dtype: torch.dtype) -> None:
    """Weights of many tokens overflow nothing, and the mean of equal parameters is that parameter."""

    def one_rank(value: float, other: float, weight: float) -> Any:
        p = {"a": torch.tensor([value], dtype=dtype), "b": torch.tensor([other], dtype=dtype)}
        return after.update(p, after.init({"a": p["a"] * 0, "b": p["b"] * 0}), weight=weight)[0]

    for found in tx.simulate(one_rank, {"data": 3}, [1.1, 1.1, 1.1], [60.0, 30.0, 0.0], [5000.0, 10000.0, 15000.0]):
        assert found["a"].dtype is dtype and found["a"].tolist() == torch.tensor([1.1], dtype=dtype).tolist()
        assert found["b"].tolist() == [20.0]
