"""Ranks that would step with different hyperparameters: a DesyncError on all of them, which names the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, raises_text
from tests.pool import Pool


class Rate:
    """A schedule that is an object; `later` is its value from step 2 on."""

    def __init__(self, value: float, later: float) -> None:
        self.value, self.later = value, later

    def __call__(self, step: Any) -> float:
        return self.value if step < 2 else self.later


def _injected(opt: tx.Optimizer) -> tx.Optimizer:
    return tx.inject_hyperparameters(opt)


# By name: (rank's own rate) -> optimizer, and a change of the state by the rate before each step.
Change = Callable[[fjoin.TrainState, float], fjoin.TrainState]


def _keep(state: fjoin.TrainState, lr: float) -> fjoin.TrainState:
    return state


def _inject(state: fjoin.TrainState, lr: float) -> fjoin.TrainState:
    return state.with_hyperparameters(lr=lr)


WAYS: dict[str, tuple[Callable[[float], tx.Optimizer], Change]] = {
    "a closure": (lambda lr: tx.sgd(lambda step: lr), _keep),
    "an object": (lambda lr: tx.adamw(Rate(lr, lr)), _keep),
    "an object that differs later": (lambda lr: tx.sgd(Rate(0.1, lr)), _keep),
    "a tensor": (lambda lr: tx.sgd(lambda step: torch.tensor(lr)), _keep),
    "a closure of a part": (lambda lr: tx.partition({"w": tx.sgd(lambda step: lr), "*": tx.sgd(0.1)}), _keep),
    "a closure around masters": (lambda lr: tx.mixed_precision(tx.sgd(lambda step: lr)), _keep),
    "an injected schedule": (
        lambda lr: _injected(tx.adamw(0.1, weight_decay=lambda step: lr)), _keep,  # type: ignore[arg-type]
    ),
    "injected values": (lambda lr: _injected(tx.sgd(0.1)), _inject),
    "injected values of a part": (lambda lr: tx.partition({"w": _injected(tx.sgd(0.1)), "*": tx.adam(0.1)}), _inject),
    "injected values around masters": (lambda lr: tx.mixed_precision(_injected(tx.sgd(0.1))), _inject),
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
COMPARED = [
    (hook, name)
    for hook in HOOKS
    for name in ("a closure", "injected values")
    if hook not in ALONE or name == "a closure"
]


def _loss(params: Any, batch: Tensor) -> Tensor:
    return (batch @ params["w"]).square().mean() + params["b"].sum()


def _train(pipeline: tx.Pipeline, change: Change, lr: float, on_device: bool = False, steps: int = 5) -> Any:
    step = judged(fjoin.train_step(_loss, pipeline), on_device)
    state = step.init({"w": torch.ones(3, 2), "b": torch.ones(2)})
    for i in range(steps):
        state = change(state, lr if i > 1 else 0.1)
        state, _ = step(state, torch.ones(4, 3) / 9)
    step.run.step_check.drain()
    return state.clone().params


def _differing(name: str, hook: str, ranks: int, on_device: bool = False) -> None:
    make, change = WAYS[name]

    def rank(lr: float) -> Any:
        return _train(HOOKS[hook](make(lr)), change, lr, on_device)

    odd = ranks - 1
    text = raises_text(
        fjoin.DesyncError, lambda: tx.simulate(rank, {"data": ranks}, [0.1] * odd + [0.3]), f"rank {odd} steps with", "=0.3",
        "rank 0", "=0.1", "with_hyperparameters",
    )  # fmt: skip
    assert ("weight_decay" if "schedule" in name else "lr") in text
    same = tx.simulate(rank, {"data": ranks}, [0.3] * ranks)
    if hook not in ("local", "a part", "now and then"):
        assert all(torch.equal(one["w"], same[0]["w"]) for one in same)


@pytest.mark.sample(2)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_different_rates_raise(name: str, on_device: bool) -> None:
    _differing(name, "mean", 2, on_device)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("hook", "name"), COMPARED)
def test_different_rates_raise_with_every_hook(hook: str, name: str) -> None:
    _differing(name, hook, 3)


def test_error_does_not_change_the_state() -> None:
    def rank(lr: float) -> Any:
        step = fjoin.train_step(_loss, HOOKS["mean"](tx.sgd(Rate(0.1, lr))), donate=False)
        state = step.init({"w": torch.ones(3, 2), "b": torch.ones(2)})
        for _ in range(2):
            state, _ = step(state, torch.ones(4, 3) / 9)
        raises_text(fjoin.DesyncError, lambda: step(state, torch.ones(4, 3) / 9), "step 2", "nothing has changed")
        return state.step, state.params["w"].clone()

    (a, w), (b, v) = tx.simulate(rank, {"data": 2}, [0.1, 0.3])
    assert a == b == 2 and torch.equal(w, v)


def on_ranks(hook: Any, name: Any) -> tuple[str, int | None]:
    make, change = WAYS[name]
    lr = 0.1 + 0.1 * fjoin.mesh({"data": -1}).rank
    try:
        _train(HOOKS[hook](make(lr)), change, lr)
    except fjoin.DesyncError as error:
        return str(error), error.rank
    return "", None


@pytest.mark.parametrize(("hook", "name"), [pair for pair in COMPARED if pair[0] in ("mean", "zero", "local")])
def test_on_real_ranks(pool: Pool, hook: str, name: str) -> None:
    for text, rank in pool.run(2, on_ranks, hook, name):
        assert "rank 1 steps with lr=0.2, but rank 0 with lr=0.1" in text and rank == 1


def registered(later: Any) -> str:
    rank = fjoin.mesh({"data": -1}).rank
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    lr = 0.1 + 0.1 * rank
    try:
        fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.sgd(Rate(0.1 if later else lr, lr))))
        for _ in range(4):
            ddp(torch.ones(3, 2)).sum().backward()
    except fjoin.DesyncError as error:
        return str(error)
    return ""


def test_in_a_registered_module(pool: Pool) -> None:
    for text in pool.run(2, registered, False):
        assert "rank 1 differs from rank 0 in its hyperparameters" in text


def test_in_a_registered_module_later(pool: Pool) -> None:
    assert all("lr" in text for text in pool.run(2, registered, True))


PURE = [name for name in HOOKS if name not in ("zero", *ALONE)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("hook", PURE)
def test_in_a_pure_step(hook: str, name: str) -> None:
    make, _ = WAYS[name]

    def rank(lr: float) -> Any:
        pipeline, params = HOOKS[hook](make(lr)), {"w": torch.ones(3, 2), "b": torch.ones(2)}
        state = pipeline.init(params)
        for i in range(5):
            if "injected values" in name and i > 1:
                state = tx.with_hyperparameters(state, lr=lr)
            params, state = pipeline.step(params, {k: p.clone() for k, p in params.items()}, state, weight=1.0)
        return params

    text = raises_text(
        fjoin.DesyncError, lambda: tx.simulate(rank, {"data": 3}, [0.1, 0.1, 0.3]), "rank 2 steps with", "=0.3",
        "rank 0", "=0.1",
    )  # fmt: skip
    assert ("weight_decay" if "schedule" in name else "lr") in text
    tx.simulate(rank, {"data": 3}, [0.3] * 3)


def registered_with_values() -> str:
    """A rank loads a state with another rate than the others."""
    rank = fjoin.mesh({"data": -1}).rank
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.inject_hyperparameters(tx.sgd(0.1))))
    ddp(torch.ones(3, 2)).sum().backward()
    saved = handle.state_dict()
    for state in saved["optimizer"].values():
        state["hyperparameters.lr"] = state["hyperparameters.lr"] * (1 + rank)
    handle.load_state_dict(saved)
    return raises_text(
        fjoin.DesyncError,
        lambda: ddp(torch.ones(3, 2)).sum().backward(),
        "rank 1 steps with lr=0.2",
        "rank 0 with lr=0.1",
    )


def test_values_in_the_state_of_a_registered_module(pool: Pool) -> None:
    assert all(pool.run(2, registered_with_values))
