"""Several modules, optimizers that communicate, several passes: ranks without input keep the order, or all ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.ddp_problem import ZeroRedundancyOptimizer, batches_of, loss, make_model
from tests.helpers import max_diff
from tests.oracle import uneven_ddp

LR = 0.05
STEPPERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda params: torch.optim.Adam(params, LR),
    "torch's zero": lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=LR),
    "zero": lambda params: fjoin.ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=LR),
    "local": lambda params: fjoin.PostLocalSGDOptimizer(
        torch.optim.Adam(params, LR), fjoin.PeriodicModelAverager(period=2, warmup_steps=0)
    ),
}
# The order in which the loop uses modules (d, g) and optimizers (zd, zg), and that of the Join's list.
FINE = {
    "one by one": ("d zd g zg", "d zd g zg"),
    "one by one, optimizers first": ("d zd g zg", "zd d zg g"),
    "modules, then optimizers": ("d g zd zg", "d g zd zg"),
}


def train(used: Any, listed: Any, stepper: Any, counts: list[int], by_world: Any = True) -> Any:
    """Train two modules; returns their parameters, or the error and the seconds after which it came."""
    began = time.monotonic()
    modules = {name: DistributedDataParallel(make_model()) for name in "dg"}
    objects: dict[str, Any] = {**modules, **{f"z{n}": STEPPERS[stepper](m.parameters()) for n, m in modules.items()}}
    try:
        with fjoin.Join([objects[name] for name in listed.split()], divide_by_initial_world_size=by_world):
            for batch in batches_of(counts)[dist.get_rank()]:
                for name in used.split():
                    if name in modules:
                        (loss(modules[name], batch) * (1 + "dg".index(name))).backward()
                    else:
                        objects[name].step()
                        objects[name].zero_grad()
    except fjoin.FjoinError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return [[p.detach().clone() for p in module.parameters()] for module in modules.values()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(2)
@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("order", FINE)
def test_the_order_of_the_list_is_kept(pool: Any, order: str, stepper: str) -> None:
    """Two modules with one optimizer each match separate training by one process."""
    counts = [3, 1]
    want = [
        uneven_ddp.train(make_model(), STEPPERS["adam"], batches_of(counts), lambda m, b, f=f: f * loss(m, b))[0]
        for f in (1, 2)
    ]
    for found in pool.run(2, train, *FINE[order], stepper, counts):
        assert max_diff(found, want) < 1e-6


@pytest.mark.parametrize("counts", [[3, 0], [3, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("used", ["g d zg zd", "d d g zg zd", "d g g zd zg"])
def test_modules_in_another_order_raise_on_all_ranks(pool: Any, used: str, counts: list[int]) -> None:
    """They raise in the first iteration, long before the time-out."""
    for kind, text, seconds in pool.run(2, train, used, "d g zg zd", "zero", counts):
        assert kind in ("JoinError", "PeerLost") and seconds < 20, (kind, text)
        assert "pass Join the order of the loop" in text, text


def passes(how: Any, counts: list[int], by_world: Any) -> Any:
    began, ddp = time.monotonic(), DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(ddp.parameters(), LR)
    try:
        with fjoin.Join([ddp, optimizer], divide_by_initial_world_size=by_world):
            for batch in batches_of(counts)[dist.get_rank()]:
                if how == "two forward passes":
                    (loss(ddp, batch) + loss(ddp, batch)).backward()
                elif how == "a probe":
                    loss(ddp, batch)
                    loss(ddp, batch).backward()
                elif how == "two backward passes":
                    loss(ddp, batch).backward()
                    loss(ddp, batch).backward()
                elif how == "a quiet probe":
                    with torch.no_grad():
                        loss(ddp, batch)
                    loss(ddp, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    except fjoin.FjoinError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.sample(2)
@pytest.mark.parametrize("by_world", [True, False])
@pytest.mark.parametrize("counts", [[3, 0], [3, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("how", ["two forward passes", "a probe", "two backward passes", "a quiet probe"])
def test_one_forward_and_one_backward_pass_for_a_step(pool: Any, how: str, counts: list[int], by_world: bool) -> None:
    for text, seconds in pool.run(2, passes, how, counts, by_world):
        want = {"two backward passes": "has stepped once for 2 iterations", "a quiet probe": ""}
        assert want.get(how, "second forward pass") in text and bool(text) != (how == "a quiet probe")
        assert seconds < 20


def accumulated(kind: Any, zero_grad: Any, by_world: Any) -> list[float]:
    """The loop of torch's tutorial, which has no zero_grad: rank r has 5 + r inputs."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp, found = DistributedDataParallel(nn.Linear(1, 1)), []
    with (TorchJoin if kind == "torch" else fjoin.Join)([ddp], divide_by_initial_world_size=by_world):
        for i in range(5 + rank):
            if zero_grad:
                ddp.zero_grad()
            ddp(torch.full((1,), float(i + 1 + rank))).sum().backward()
            found.append(ddp.module.weight.grad.item())  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("by_world", [True, False])
@pytest.mark.parametrize("zero_grad", [True, False])
def test_gradients_accumulated_over_iterations_match_torch(pool: Any, zero_grad: bool, by_world: bool) -> None:
    torchs = pool.run(2, accumulated, "torch", zero_grad, by_world)
    assert pool.run(2, accumulated, "fjoin", zero_grad, by_world) == torchs
    if not by_world and not zero_grad:
        assert torchs[1][-1] == 24.5, "17.5 + 7 / 1 rank with input"


def registered(counts: list[int]) -> Any:
    """A registered pipeline steps in backward: no optimizer has a turn."""
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    for model in models:
        fjoin.ddp.register(model, tx.fuse(tx.mean("data", over="world"), tx.adam(LR)))
    with fjoin.Join(models):
        for batch in batches_of(counts)[dist.get_rank()]:
            for factor, model in enumerate(models, 1):
                model.zero_grad()
                (loss(model, batch) * factor).backward()
    return [[p.detach().clone() for p in model.parameters()] for model in models]


def test_two_registered_modules(pool: Any) -> None:
    counts = [3, 1]
    want = [
        uneven_ddp.train(make_model(), STEPPERS["adam"], batches_of(counts), lambda m, b, f=f: f * loss(m, b))[0]
        for f in (1, 2)
    ]
    for found in pool.run(2, registered, counts):
        assert max_diff(found, want) < 1e-6
