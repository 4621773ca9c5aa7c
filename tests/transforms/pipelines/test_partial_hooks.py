"""Hooks that leave some gradients as each rank's own, with ranks without weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, stepped

HOOKS: dict[str, Any] = {
    "masked": lambda: tx.masked(tx.mean("data"), "w"),
    "partition": lambda: tx.partition({"w": tx.mean("data"), "*": tx.identity()}),
    "a function": lambda: tx.stateless(lambda g: 2 * g),
    "masked, encoded": lambda: tx.masked(tx.compress(tx.float32(), tx.mean("data")), "w"),
    "a switch": lambda: tx.switch_after(2, tx.masked(tx.mean("data"), "w"), tx.mean("data")),
}
WEIGHTS = [(1.0, 0.0, 2.0), (0.0, 3.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
START = {"w": torch.ones(3, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}


def loss_fn(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch[0]).sum() ** 2 + (params["b"] * batch[0][:2]).sum() ** 2


def batch_of(rank: int, step: int) -> tuple[Tensor, float]:
    g = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(3, generator=g, dtype=torch.float64) / 4, WEIGHTS[step % len(WEIGHTS)][rank]


def pipeline(name: str) -> Any:
    return tx.fuse(HOOKS[name](), tx.sgd(0.1, momentum=0.9))


def purely(name: str, rank: int, as_tensor: bool = False) -> Any:
    made, params = pipeline(name), START
    state = made.init(params)
    for step in range(6):
        x, weight = batch_of(rank, step)
        grads = torch.func.grad(loss_fn)(params, (x, weight))
        if not weight:  # it does not count, whatever it is
            grads["b"] = grads["b"] * float("nan")
        params, state = made.step(params, grads, state, weight=torch.tensor(weight) if as_tensor else weight)
    return params


def in_train_step(name: str, rank: int) -> Any:
    step = fjoin.train_step(loss_fn, pipeline(name), weight=lambda batch: batch[1])
    state = stepped(step, step.init(START), (batch_of(rank, i) for i in range(6)))
    return {path: p.clone() for path, p in state.params.items()}


@pytest.mark.parametrize("name", HOOKS)
def test_a_rank_without_weight_gives_zeros(name: str) -> None:
    want = tx.simulate(lambda rank: in_train_step(name, rank), {"data": 3}, [0, 1, 2])
    for as_tensor in (False, True):
        got = tx.simulate(lambda rank: purely(name, rank, as_tensor), {"data": 3}, [0, 1, 2])  # noqa: B023
        for one, other in zip(got, want, strict=True):
            assert max_diff(one, other) < 1e-12
