"""A loss that depends on other tensors than the given parameters trains nothing: the first step raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text, stepped

X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


def make(calls_module: bool = True, hook: Any = None, mesh: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    apply, params, _ = fjoin.functional(copy.deepcopy(module))

    def loss(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(module(batch) if calls_module else apply(params, {}, batch), Y)

    step = fjoin.train_step(loss, tx.fuse(hook or tx.mean("data"), tx.sgd(0.1)), mesh=mesh, **settings)
    return step, step.init(params)


HOOKS = [
    tx.mean("data"), tx.compress(tx.int8(), tx.mean("data")), tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("hook", HOOKS, ids=["mean", "int8", "clip"])
def test_a_loss_that_calls_another_module_is_refused(hook: Any, bucket_bytes: int, accumulate: int) -> None:
    step, state = make(hook=hook, bucket_bytes=bucket_bytes, accumulate=accumulate)
    before = state.clone()
    raises_text(ValueError, lambda: step(state, X), "no parameter has got a gradient", "apply(params, buffers, ...)")
    assert all(torch.equal(p, before.params[path]) for path, p in state.params.items())


def on_a_process(sizes: list[int]) -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=30)
    step, state = make(mesh=mesh)
    try:
        state = stepped(step, state, step.join([X] * sizes[mesh.rank]))
    except (ValueError, fjoin.PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("sizes", [[2, 2, 2], [0, 2, 1]], ids=str)
def test_on_all_ranks(pool: Any, sizes: list[int]) -> None:
    texts = pool.run(3, on_a_process, sizes)
    assert all("no parameter has got a gradient" in text for text in texts)
    assert all(text.startswith("PeerLost") for text, n in zip(texts, sizes, strict=True) if n == 0)


def test_ranks_and_steps_without_weight_do_not_raise() -> None:
    def one_rank(n: int) -> int:
        step, state = make(calls_module=False, weight=lambda batch: float(batch.sum() > 0))
        state = stepped(step, state, step.join([torch.zeros(4, 3), X, X][: n and n + 1]))
        return state.step

    assert tx.simulate(one_rank, {"data": 3}, [2, 0, 1]) == [3, 3, 3]


def test_a_later_step_may_reach_no_parameter() -> None:
    """All terms of a loss may be switched off, for example."""

    def loss(params: Any, batch: float) -> Any:
        return params["w"].sum() * batch if batch else torch.zeros((), requires_grad=True)

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(1.0)))
    state = stepped(step, step.init({"w": torch.zeros(2), "never": torch.zeros(1)}), (1.0, 0.0, 1.0))
    assert state.params["w"].tolist() == [-2.0, -2.0]


def test_after_a_refused_step_a_right_one_can_follow_on_one_rank() -> None:
    """Only the first step checks."""
    step, state = make(calls_module=False)
    assert not step.run.passes._reached
    state, _ = step(state, X)
    assert step.run.passes._reached


def test_a_step_without_parameters() -> None:
    step = fjoin.train_step(lambda p, b: torch.ones((), requires_grad=True) * b, tx.fuse(tx.mean("data"), tx.sgd(1.0)))
    step(step.init({}), 1.0)
