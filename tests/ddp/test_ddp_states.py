"""States of hooks in DistributedDataParallel: step counters continue, and new parameter names find their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import same_bits

INPUTS = [1.0, float("nan"), 1.0, 1.0, 1.0]


def _negated_later() -> tx.Pipeline:
    later = tx.chain(tx.mean("data"), tx.stateless(torch.neg))
    return tx.skip_if_nonfinite(tx.fuse(tx.switch_after(2, tx.mean("data"), later), tx.sgd(1.0)))


def _loss(params: Any, x: Tensor) -> Tensor:
    return (params["weight"] * x).sum()


def _three_ways() -> list[list[float]]:
    mesh, first = fjoin.mesh({"data": -1}), {"weight": torch.zeros(1, 1)}
    pure, stepped, module = [], [], []
    pipeline, params = _negated_later(), first
    state = pipeline.init(params)
    step = fjoin.train_step(_loss, _negated_later(), mesh=mesh)
    train_state = step.init(first)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    ddp = DistributedDataParallel(layer)
    fjoin.ddp.register(ddp, _negated_later())
    for x in map(torch.tensor, INPUTS):
        with fjoin.bind(mesh):
            params, state = pipeline.step(params, torch.func.grad(_loss)(params, x), state)
        train_state, _ = step(train_state, x)
        ddp.zero_grad()
        ddp(x.view(1, 1)).sum().backward()
        for seen, weight in ((pure, params["weight"]), (stepped, train_state.params["weight"]), (module, layer.weight)):
            seen.append(weight.item())
    return [pure, stepped, module]


def test_skipped_steps_count_as_calls(pool: Any) -> None:
    for ways in pool.run(2, _three_ways):
        assert ways == [[-1.0, -1.0, 0.0, 1.0, 2.0]] * 3


def _cut_anew() -> Any:
    """Three passes; the second has other buckets and is left out. Then two more with a new module that loads the state."""

    def fresh() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
        hook = fjoin.ddp.batched_powerSGD_hook(start_powerSGD_iter=0, min_compression_rate=1.0)
        return ddp, fjoin.ddp.register(ddp, tx.skip_if_nonfinite(tx.fuse(hook, tx.sgd(0.1))))

    def passes(ddp: Any, inputs: list[float]) -> None:
        for x in inputs:
            ddp.zero_grad()
            ddp(torch.full((3, 20), x)).square().mean().backward()

    bad = float("nan") if torch.distributed.get_rank() == 0 else 1.0
    ddp, handle = fresh()
    passes(ddp, [1.0, bad, 2.0])
    other, resumed = fresh()
    other.module.load_state_dict(ddp.module.state_dict())
    resumed.load_state_dict(handle.state_dict())
    passes(other, [1.0, 2.0])
    return handle.skipped, resumed.step, [p.detach().clone() for p in other.parameters()]


def test_batched_power_sgd_resumes_with_other_buckets(pool: Any) -> None:
    """This includes a skipped step, which keeps the old state."""
    (skipped, steps, one), (_, _, other) = pool.run(2, _cut_anew)
    assert (skipped, steps) == (1, 5) and all(torch.isfinite(p).all() for p in one) and same_bits(one, other)
