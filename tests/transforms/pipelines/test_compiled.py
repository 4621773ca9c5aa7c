"""Hooks, optimizers and whole steps under torch.compile: what is traced whole equals what runs eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff

# Dynamo's own, about how it handles a Function, and about caches of ours that it looks through.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

HOOKS: dict[str, Callable[[], tx.Transform]] = {
    "mean": lambda: tx.mean("data"),
    "live": lambda: tx.mean("data", over="live"),
    "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
    "int8": lambda: tx.compress(tx.int8(block=4), tx.mean("data")),
    "fed back": lambda: tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))),
    "partition": lambda: tx.partition({"w": tx.mean("data"), "*": tx.sum_over("data")}),
    "masked": lambda: tx.masked(tx.sum_over("data"), "w"),
    "outer step": lambda: tx.outer_step(tx.mean("data"), tx.sgd(0.5)),
    "low rank": lambda: tx.power_sgd("data", 1, min_compression_rate=0.5),
}
SHORT = ("int8", "partition")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with fjoin.bind(fjoin.mesh({"data": -1})):
        yield
    torch._dynamo.reset()


def start() -> dict[str, Tensor]:
    return {"w": torch.ones(3, 4), "b": torch.arange(5.0)}


def grads(step: int) -> dict[str, Tensor]:
    return {path: torch.sin((step + 1) * p + 1) for path, p in start().items()}


def compiled(function: Any, fullgraph: bool = True) -> Any:
    return torch.compile(function, fullgraph=fullgraph, backend="eager")


def hook_runs(name: str) -> float:
    """The largest difference from eager results and states in two calls."""
    hook, worst = HOOKS[name](), 0.0
    run, params = compiled(hook.update), start()
    state = other = hook.init(params)
    for step in range(2):
        given = {"weight": 3.0}
        out, state = hook.update(grads(step), state, params, **given)
        got, other = run(grads(step), other, params, **given)
        worst = max(worst, max_diff((out, state), (got, other)))
    return worst


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in HOOKS])
def test_a_hook_is_traced_whole(name: str) -> None:
    assert hook_runs(name) < 1e-6


def on_a_process(names: list[str]) -> list[float]:
    warnings.simplefilter("ignore")
    with fjoin.bind(fjoin.mesh({"data": -1})):
        return [hook_runs(name) for name in names]


@pytest.mark.long
def test_a_hook_is_traced_whole_on_real_ranks(pool: Any) -> None:
    """Compiled hooks use torch's functional collectives."""
    for found in pool.run(2, on_a_process, ["mean", "mean, clip"]):
        assert max(found) < 1e-6


@pytest.mark.parametrize("optimizer", [tx.sgd(0.1, momentum=0.9), tx.adamw(0.1)], ids=repr)
def test_an_optimizer_is_traced_whole(optimizer: tx.Optimizer) -> None:
    params = start()
    want, state = optimizer.step(params, grads(0), optimizer.init(params))
    got, other = compiled(optimizer.step)(params, grads(0), optimizer.init(params))
    assert max_diff((want, state), (got, other)) < 1e-6


PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "mean": lambda: tx.fuse(tx.mean("data"), tx.sgd(0.1)),
    "adamw": lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(0.1)),
    "average": lambda: tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 2),
}


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "average")) for name in PIPELINES]
)
def test_a_step_is_traced(name: str, fullgraph: bool) -> None:
    """Two compiled steps, and an eager one of the same pipeline, are those of another pipeline, which is never compiled."""
    pipeline, eagerly = PIPELINES[name](), PIPELINES[name]()
    run = compiled(pipeline.step, fullgraph)
    params = others = start()
    state, other = eagerly.init(params), pipeline.init(params)
    for step in range(3):
        params, state = eagerly.step(params, grads(step), state, weight=2.0)
        others, other = (run if step < 2 else pipeline.step)(others, grads(step), other, weight=2.0)
    assert max_diff(params, others) < 1e-6
