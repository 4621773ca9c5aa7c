"""Slips around a module that steps in its backward pass, and around the end of a run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.pool import Pool

X = torch.ones(4, 3)


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(3, 1))


def stepped_twice(kind: Any) -> list[str]:
    ddp = _model()
    if kind == "a part":  # the optimizer steps only what the pipeline leaves alone
        pipeline = tx.fuse(tx.mean("data"), tx.partition({"weight": tx.sgd(0.1), "*": tx.frozen()}))
        optimizer = torch.optim.SGD([ddp.module.bias], lr=0.1)  # type: ignore[list-item]
    else:
        pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))
        other = nn.Linear(3, 1)
        optimizer = torch.optim.SGD((other if kind == "another model" else ddp).parameters(), lr=0.1)
    fjoin.ddp.register(ddp, tx.mean("data") if kind == "only a hook" else pipeline)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            ddp(X).square().mean().backward()
            optimizer.step()
    return [str(one.message) for one in seen if "steps" in str(one.message)]


@pytest.mark.parametrize("kind", ["the same", "only a hook", "another model", "a part"])
def test_warns_once_about_an_optimizer_beside_a_registered_pipeline(pool: Pool, kind: str) -> None:
    for found in pool.run(2, stepped_twice, kind):
        assert len(found) == (kind == "the same") and all("remove optimizer.step()" in text for text in found)


def without_zero_grad(zero_grad: Any, view: Any, window: Any) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1), gradient_as_bucket_view=view)
    fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9)))
    for i in range(6):
        if zero_grad and i % window == 0:
            ddp.zero_grad()
        if (i + 1) % window:
            with ddp.no_sync():
                ddp(X + i).square().mean().backward()
        else:
            ddp(X + i).square().mean().backward()
            assert ddp.module.weight.grad is not None, "it can be read after the pass"  # type: ignore[union-attr]
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_a_loop_without_zero_grad_steps_as_one_with_it(pool: Pool, view: bool, window: int) -> None:
    (with_it,), (without,) = (pool.run(1, without_zero_grad, zero, view, window) for zero in (True, False))
    assert max_diff(with_it, without) == 0


def test_a_loss_that_reads_its_module_is_an_error() -> None:
    model = nn.Linear(4, 1)
    apply, params, _ = fjoin.functional(model)
    x = torch.ones(8, 4)

    def loss(p: Any, x: Any) -> Any:
        return apply(p, {}, x).square().mean() + 10 * model.weight.square().sum()

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.01)))
    for call in (lambda: step(step.init(params), x), lambda: fjoin.value_and_grad(loss)(params, x)):
        raises_text(ValueError, call, "'weight' of the module itself", "params['weight']")
    fine = fjoin.train_step(lambda p, x: apply(p, {}, x).mean() + p["weight"].square().sum(), step.pipeline)
    fine(fine.init(params), x)
