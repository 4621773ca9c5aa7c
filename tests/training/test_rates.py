"""A learning rate that is no finite number stops a step before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text

BAD: dict[str, tuple[type[Exception], Any]] = {
    "nan": (ValueError, math.nan), "inf": (ValueError, math.inf), "a nan tensor": (ValueError, torch.tensor(math.nan)),
    "a vector": (ValueError, torch.ones(2)), "a string": (TypeError, "0.1"), "nothing": (TypeError, None),
    "a bool": (TypeError, True),
}  # fmt: skip


def from_step_one(value: Any) -> Callable[[Any], Any]:
    def schedule(step: Any) -> Any:
        return value if step >= 1 else 0.1

    return schedule


@pytest.mark.parametrize("make", [tx.sgd, tx.adamw, tx.lion, tx.lamb, lambda lr: tx.inject_hyperparameters(tx.sgd(lr))])
@pytest.mark.parametrize("bad", BAD)
def test_in_a_pure_step(bad: str, make: Callable[..., tx.Optimizer]) -> None:
    kind, value = BAD[bad]
    params = {"w": torch.ones(3)}
    opt = make(from_step_one(value))
    state = opt.init(params)
    if "inject" in repr(opt):  # which shows the rate of the next step in its state
        raises_text(kind, lambda: opt.step(params, params, state), "schedule", "step 1", "expected")
        return
    params, state = opt.step(params, params, state)
    raises_text(kind, lambda: opt.step(params, params, state), "schedule", "step 1", "expected")


@pytest.mark.parametrize("bad", BAD)
def test_in_a_train_step(bad: str) -> None:
    """The state stays whole: neither torn nor changed."""
    kind, value = BAD[bad]
    pipeline = tx.fuse(tx.mean("data"), tx.partition({"a": tx.adamw(0.1), "b": tx.sgd(from_step_one(value))}))
    step = fjoin.train_step(lambda p, x: ((p["a"] + p["b"]) * x).sum(), pipeline)
    state = step.init({"a": torch.ones(3), "b": torch.ones(3)})
    state, _ = step(state, torch.ones(3))
    before = {path: p.clone() for path, p in state.params.items()}
    raises_text(kind, lambda: step(state, torch.ones(3)), "from_step_one.<locals>.schedule", "step 1")
    assert max_diff(state.params, before) == 0
    assert state.step == 1


def test_a_tensor_that_becomes_nan() -> None:
    rate = torch.tensor(0.1)
    step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(rate)))
    state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
    rate.fill_(math.nan)
    before = state.params["w"].clone()
    raises_text(ValueError, lambda: step(state, torch.ones(3)), "lr must be a finite number", "nan")
    assert max_diff(state.params["w"], before) == 0


def test_construction_raises_on_bad_values() -> None:
    nan, inf = math.nan, math.inf
    for made in (
        lambda: tx.sgd(inf),
        lambda: tx.adamw(nan),
        lambda: tx.sgd(torch.tensor(inf)),
        lambda: tx.adam(eps=inf),
        lambda: tx.sgd(weight_decay=nan),
        lambda: tx.sgd(momentum=0.9, dampening=nan),
        lambda: tx.linear(0.0, nan, 5),
        lambda: tx.linear(inf, 0.0, 5),
        lambda: tx.cosine(nan, 5),
        lambda: tx.warmup_cosine(1.0, 1, 5, end=inf),
        lambda: tx.from_torch_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, nan), 0.1, 2),
        lambda: tx.linear(0.0, 1.0, 10**400 - 1) and tx.linear(0.0, 10**400, 5),  # type: ignore[arg-type]
    ):
        raises_text(ValueError, made, "must be")
    raises_text(TypeError, lambda: tx.linear("0", 1.0, 5), "start", "'0'")  # type: ignore[arg-type]
    raises_text(TypeError, lambda: tx.warmup(3, 0.1), "then", "0.1", "lambda step: 0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [lambda step: 0.1, from_step_one(0.1)])
def test_only_the_rate_follows_a_schedule_by_itself(schedule: Any) -> None:
    """The others do so in inject_hyperparameters."""
    params = {"w": torch.ones(3)}
    texts = "weight_decay", "inject_hyperparameters(...)"
    for opt in (tx.adamw(0.1, weight_decay=schedule), tx.mixed_precision(tx.sgd(0.1, weight_decay=schedule))):
        raises_text(TypeError, lambda opt=opt: opt.init(params), *texts)  # type: ignore[misc]
        step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), opt))
        raises_text(TypeError, lambda step=step: step.init(params), *texts)  # type: ignore[misc]
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        raises_text(TypeError, lambda opt=opt, p=p: fjoin.Optimizer([p], opt).step(), *texts)  # type: ignore[misc]
        assert max_diff(p, torch.ones(3)) == 0
    opt = tx.inject_hyperparameters(tx.adamw(0.1, weight_decay=schedule))
    new, _ = opt.step(params, params, opt.init(params))
    assert max_diff(new, tx.adamw(0.1, weight_decay=0.1).step(params, params, tx.adamw().init(params))[0]) < 1e-6


def test_built_in_schedules_are_not_checked_again() -> None:
    """Their values are known to be finite, so a step on a device has nothing to wait for."""
    schedules = [
        tx.linear(0.1, 0.0, 9), tx.cosine(0.1, 9), tx.warmup_cosine(0.1, 2, 9), tx.warmup(2, tx.cosine(0.1, 9)),
        tx.from_torch_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), 0.1, 2),
    ]  # fmt: skip
    for schedule in schedules:
        assert tx.sgd(schedule).watched == () == tx.mixed_precision(tx.adamw(schedule)).watched, schedule
    assert tx.sgd(tx.warmup(2, from_step_one(0.1))).watched != ()


def under_a_module() -> tuple[float, float]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    handle = fjoin.ddp.register(model, tx.fuse(tx.mean("data"), tx.adamw(from_step_one(math.nan))))

    def backward() -> None:
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()

    backward()
    before = {path: p.clone() for path, p in model.module.state_dict().items()}
    raises_text(ValueError, backward, "schedule", "nan in step 1")
    return max_diff(dict(model.module.state_dict()), before), float(handle.state_dict()["optimizer"]["weight"]["step"])


def test_under_a_registered_module(pool: Any) -> None:
    assert pool.run(2, under_a_module) == [(0.0, 1.0), (0.0, 1.0)]
