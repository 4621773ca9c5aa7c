"""A learning rate that is no finite number, or another on one rank, stops a step before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff, raises_text, stepped
from tests.scalars import registered
from tests.training.small import step_of

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
    params, state = opt.step(params, params, state)
    raises_text(kind, lambda: opt.step(params, params, state), "schedule", "step 1", "expected")


@pytest.mark.parametrize("bad", [*BAD, "a tensor that becomes nan"])
def test_in_a_train_step(bad: str) -> None:
    """The state stays whole: neither torn nor changed."""
    rate = torch.tensor(0.1)
    kind, value = BAD.get(bad, (ValueError, None))
    texts = ("from_step_one.<locals>.schedule", "step 1") if bad in BAD else ("lr must be a finite number", "nan")
    schedule = from_step_one(value) if bad in BAD else rate
    pipeline = tx.fuse(tx.mean("data"), tx.partition({"w": tx.adamw(0.1), "v": tx.sgd(schedule)}))
    step, state = step_of(lambda p, x: ((p["w"] + p["v"]) * x).sum(), pipeline)
    state, _ = step(state, torch.ones(2))
    rate.fill_(math.nan)
    before = state.clone().params
    raises_text(kind, lambda: step(state, torch.ones(2)), *texts)
    assert max_diff(state.params, before) == 0 and state.step == 1


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


# -- ranks that would step with different hyperparameters: an error on all of them, which names the rank -----------------


class Rate:
    """A schedule that is an object; `later` is its value from step 2 on."""

    def __init__(self, value: float, later: float) -> None:
        self.value, self.later = value, later

    def __call__(self, step: Any) -> float:
        return self.value if step < 2 else self.later


def injected(opt: tx.Optimizer) -> tx.Optimizer:
    return tx.inject_hyperparameters(opt)


# By name: rank's own rate -> optimizer; the last ones are given values before each step.
WAYS: dict[str, Callable[[float], tx.Optimizer]] = {
    "a closure": lambda lr: tx.sgd(lambda step: lr), "an object": lambda lr: tx.adamw(Rate(lr, lr)),
    "an object that differs later": lambda lr: tx.sgd(Rate(0.1, lr)), "a tensor": lambda lr: tx.sgd(lambda step: torch.tensor(lr)),
    "a closure of a part": lambda lr: tx.partition({"w": tx.sgd(lambda step: lr), "*": tx.sgd(0.1)}),
    "a closure around masters": lambda lr: tx.mixed_precision(tx.sgd(lambda step: lr)),
    "an injected schedule": lambda lr: injected(tx.adamw(0.1, weight_decay=lambda step: lr)),  # type: ignore[arg-type]
    "values": lambda lr: injected(tx.sgd(0.1)),
    "values of a part": lambda lr: tx.partition({"w": injected(tx.sgd(0.1)), "*": tx.adam(0.1)}),
    "values around masters": lambda lr: tx.mixed_precision(injected(tx.sgd(0.1))),
}  # fmt: skip
HOOKS: dict[str, Callable[[tx.Optimizer], tx.Pipeline]] = {
    "mean": lambda opt: tx.fuse(tx.mean("data"), opt),
    "clip": lambda opt: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), opt),
    "zero": lambda opt: tx.zero(tx.mean("data"), opt, "data"),
    "int8": lambda opt: tx.fuse(tx.compress(tx.int8(), tx.mean("data")), opt),
    "power_sgd": lambda opt: tx.fuse(tx.power_sgd("data", 1), opt),
    "local": lambda opt: tx.local_sgd(opt, tx.mean("data"), every=2),
    "a part": lambda opt: tx.fuse(tx.masked(tx.mean("data"), "w"), opt),
    "now and then": lambda opt: tx.fuse(tx.every(2, tx.mean("data")), opt),
    "skips": lambda opt: tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), opt)),
}
# Where ranks take steps of their own they compare only their first: their optimizers' counts may differ.
ALONE = ("local", "now and then")
ROWS = [("mean", name) for name in WAYS] + [
    (hook, name) for hook in HOOKS for name in ("a closure", "values") if hook not in ALONE or name == "a closure"
]


def trained(hook: str, name: str, lr: float, place: str = "step") -> Any:
    """Five steps, in the place's way."""
    pipeline, params = HOOKS[hook](WAYS[name](lr)), {"w": torch.ones(3, 2), "b": torch.ones(2)}
    values = [0.1, 0.1, lr, lr, lr] if name.startswith("values") else [None] * 5
    if place == "pure":
        pure = pipeline.init(params)
        for value in values:
            pure = pure if value is None else tx.with_hyperparameters(pure, lr=value)
            params, pure = pipeline.step(params, {k: p.clone() for k, p in params.items()}, pure, weight=1.0)
        return params
    step = judged(
        fjoin.train_step(lambda p, x: (x @ p["w"]).square().mean() + p["b"].sum(), pipeline), place == "device"
    )
    state = step.init(params)
    for value in values:
        state = state if value is None else state.with_hyperparameters(lr=value)
        state, _ = step(state, torch.ones(4, 3) / 9)
    step.run.step_check.drain()
    return state.clone().params


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["pure", "step", "device"])
@pytest.mark.parametrize(("hook", "name"), ROWS)
def test_different_rates_raise(hook: str, name: str, place: str) -> None:
    if place == "pure" and hook in ("zero", *ALONE):
        return
    text = raises_text(
        fjoin.DesyncError, lambda: tx.simulate(lambda lr: trained(hook, name, lr, place), {"data": 3}, [0.1, 0.1, 0.3]),
        "rank 2 steps with", "=0.3", "rank 0", "=0.1",
    )  # fmt: skip
    assert ("weight_decay" if "schedule" in name else "lr") in text and (
        "with_hyperparameters" in text or place == "pure"
    )
    same = tx.simulate(lambda lr: trained(hook, name, lr, place), {"data": 2}, [0.3] * 2)
    assert place == "pure" or hook in ("a part", *ALONE) or torch.equal(same[0]["w"], same[1]["w"])


@pytest.mark.parametrize(("ranks", "make", "v"), [(2, tx.lamb, torch.ones(2)), (4, tx.adamw, torch.ones(2).double())])
def test_a_schedule_where_ranks_own_nothing_of_a_leaf(ranks: int, make: Any, v: torch.Tensor) -> None:
    step_on = lambda rates: tx.simulate(lambda: trained_on_pieces(make(rates), v), {"data": ranks})  # noqa: E731
    own, ours = step_on(lambda step: 0.1 * (1 - step / 8)), step_on(tx.linear(0.1, 0.0, 8))
    assert max(max_diff(a, b) for a, b in zip(own, ours, strict=True)) < 1e-6


def trained_on_pieces(opt: tx.Optimizer, v: torch.Tensor) -> Any:
    step = fjoin.train_step(lambda p, x: p["w"].square().sum() + p["v"].square().sum(), HOOKS["zero"](opt))
    return stepped(step, step.init({"w": torch.ones(8, 5), "v": v}), [torch.ones(1)] * 4).clone().params


def in_a_module() -> list[str]:
    """At once, later, and after loading a state with another rate than the others. A rate that is no number changes nothing."""
    module, handle, train = registered(tx.fuse(tx.mean("data"), tx.adamw(from_step_one(math.nan))))
    train(1.0)
    before, rank = module.w.tolist(), dist.get_rank()
    raises_text(ValueError, lambda: train(1.0), "schedule", "nan in step 1")
    assert module.w.tolist() == before and handle.state_dict()["optimizer"]["w"]["step"] == 1
    mine = 0.1 + 0.1 * rank
    texts = [raises_text(fjoin.DesyncError, lambda: registered(HOOKS["mean"](tx.sgd(Rate(mine, mine)))))]
    _, _, train = registered(HOOKS["mean"](tx.sgd(Rate(0.1, mine))))
    texts.append(raises_text(fjoin.DesyncError, lambda: [train(1.0) for _ in range(4)]))
    _, handle, train = registered(HOOKS["mean"](injected(tx.sgd(0.1))))
    train(1.0)
    saved = handle.state_dict()
    for state in saved["optimizer"].values():
        state["hyperparameters.lr"] = state["hyperparameters.lr"] * (1 + rank)
    handle.load_state_dict(saved)
    return [*texts, raises_text(fjoin.DesyncError, lambda: train(1.0))]


def test_on_real_ranks_in_a_registered_module(pool: Any) -> None:
    for at_once, later, loaded in pool.run(2, in_a_module):
        assert "rank 1 differs from rank 0 in its hyperparameters" in at_once and "lr" in later
        assert "rank 1 steps with lr=0.2" in loaded and "rank 0 with lr=0.1" in loaded
