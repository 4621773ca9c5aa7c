"""Optimizers as functions: derivatives through training, ensembles, schedules, parts by path, dtypes, memory layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler as torchs

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, params_like, same_bits, stepped
from tests.optimizer_table import OPTIMIZERS
from tests.oracle import optim


def _problem(dtype: torch.dtype, steps: int = 5) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    params = {k: v for k, v in params_like(0, dtype).items() if v.numel()}
    return params, [{k: v for k, v in params_like(10 + i, dtype).items() if v.numel()} for i in range(steps)]


# By name: lr -> optimizer, of every optimizer that has one. For matrices, so that muon takes them.
BY_RATE: dict[str, Callable[[Any], tx.Optimizer]] = {
    "sgd": lambda lr: tx.sgd(lr, momentum=0.9),
    "adam": tx.adam,
    "adamw": lambda lr: tx.adamw(lr, weight_decay=0.1),
    "nadam": tx.nadam,
    "radam": lambda lr: tx.radam(lr, betas=(0.9, 0.9)),  # divides by the second moment from its sixth step on
    "adamax": tx.adamax,
    "adagrad": lambda lr: tx.adagrad(lr, lr_decay=0.1),
    "adadelta": tx.adadelta,
    "adafactor": tx.adafactor,
    "rmsprop": lambda lr: tx.rmsprop(lr, momentum=0.9, centered=True),
    "rprop": tx.rprop,
    "asgd": lambda lr: tx.asgd(lr, lambd=0.1),
    "lion": lambda lr: tx.lion(lr, weight_decay=0.1),
    "lamb": lambda lr: tx.lamb(lr, weight_decay=0.1),
    "muon": tx.muon,
    "mixed_precision": lambda lr: tx.mixed_precision(tx.sgd(lr)),
}
TARGET = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -0.2]], dtype=torch.float64)
# Those that keep their rates in float32, or orthogonalise in bfloat16: a difference quotient sees their rounding.
COARSE = {"asgd": (1e-3, 1e-3), "muon": (1e-2, 0.1)}


def test_every_optimizer_is_tried_as_a_function() -> None:
    assert BY_RATE.keys() | {"frozen", "partition", "inject_hyperparameters"} == OPTIMIZERS.keys()


def _loss(p: Tensor) -> Tensor:
    return ((p - TARGET) ** 2).sum()


@pytest.mark.parametrize("name", BY_RATE)
def test_training_can_be_differentiated(name: str) -> None:
    """d(loss after 7 steps)/d(lr), and d/d(start), against finite differences."""

    def after(lr: Tensor, start: Tensor) -> Tensor:
        opt, p = BY_RATE[name](lr), start
        state = opt.init_param(p)
        for _ in range(7):
            p, state = opt.step_param(p, torch.func.grad(_loss)(p), state)
        return _loss(p)

    h, tolerance = COARSE.get(name, (1e-6, 1e-5))
    lr, start = torch.tensor(0.05, dtype=torch.float64), 0.1 * TARGET.flip(0)
    by_rate, by_start = torch.func.grad(after, argnums=(0, 1))(lr, start)
    quotient = (after(lr + h, start) - after(lr - h, start)) / (2 * h)
    assert by_rate != 0 and abs(by_rate - quotient) < tolerance * max(1.0, abs(quotient))
    if name != "muon":  # whose steps in bfloat16 are flat almost everywhere
        direction = torch.ones_like(start)
        quotient = (after(lr, start + h * direction) - after(lr, start - h * direction)) / (2 * h)
        assert abs((by_start * direction).sum() - quotient) < tolerance * max(1.0, abs(quotient))
    # opt.step sees that something differentiates through it, and does not step in place.
    opt, params = BY_RATE[name](lr.clone().requires_grad_()), {"p": torch.zeros(2, 3, dtype=torch.float64)}
    out, _ = opt.step(params, {"p": TARGET}, opt.init(params))
    assert out["p"].requires_grad


@pytest.mark.parametrize("name", BY_RATE)
def test_derivatives_are_finite_at_zero(name: str) -> None:
    """Where parameters, gradients and moments are 0, roots and norms have no derivative of their own."""

    def after(start: Tensor) -> Tensor:
        opt, p = BY_RATE[name](0.1), start
        state = opt.init_param(p)
        for _ in range(2):
            p, state = opt.step_param(p, p * 0, state)
        return p.sum()

    assert torch.isfinite(torch.func.grad(after)(torch.zeros(2, 3, dtype=torch.float64))).all()


def test_states_with_different_step_counts_are_stepped_separately() -> None:
    """A tree put together from two trainings: one flat kernel would give both the same step count."""
    opt, p = tx.adam(0.1), torch.ones(2, dtype=torch.float64)
    old = opt.init({"a": p})
    for _ in range(5):
        _, old = opt.step({"a": p}, {"a": p}, old)
    both = {"a": old["a"], "b": opt.init({"b": p})["b"]}
    new, state = opt.step({"a": p, "b": p}, {"a": p, "b": p}, both)
    assert state["a"].step == 6 and state["b"].step == 1
    alone, _ = opt.step({"a": p}, {"a": p}, {"a": old["a"]})
    assert same_bits(new["a"], alone["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_matches_torch(dtype: torch.dtype) -> None:
    params, grads = _problem(dtype)
    for g in grads[:5]:
        for max_norm in (0.1, 1.0, 100.0):
            got, _ = tx.clip_by_global_norm(max_norm).update(g, ())
            assert max_diff(list(got.values()), optim.clip(list(g.values()), max_norm)) <= (
                1e-7 if dtype == torch.float32 else 1e-15
            )
    assert tx.clip_by_global_norm(1.0).update({}, ()) == ({}, ())
    bad, _ = tx.clip_by_global_norm(1.0).update({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(1)}, ())
    assert bad["b"].isnan().all()


def test_a_step_without_values_of_an_optimizer_that_keeps_its_rate() -> None:
    with FakeTensorMode():
        params = {"w": torch.ones(5)}
        opt = tx.rprop(0.1)
        assert opt.step(params, params, opt.init(params))[0]["w"].shape == (5,)


def test_an_optimizer_of_ones_own_is_called_with_parameters_only() -> None:
    """One for kernels, that takes no vector, in a train_step and in fjoin.Optimizer."""
    muon = tx.muon(0.02)

    def step_param(p: Tensor, grad: Tensor, state: Any) -> Any:
        new, state = muon.step_param(p.flatten(1), grad.flatten(1), state)
        return new.view(p.shape), state

    def step_param_(p: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
        muon.step_param_(p.flatten(1), grad.flatten(1), state, **guards)

    own = tx.Optimizer(lambda p: muon.init_param(p.flatten(1)), step_param, step_param_, elementwise=False)
    w = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    want, state = w.flatten(1), muon.init_param(w.flatten(1))
    for _ in range(2):
        want, state = muon.step_param(want, torch.ones_like(want), state)

    step = fjoin.train_step(lambda p, batch: p["w"].sum() * batch, tx.fuse(tx.mean("data"), own))
    p = torch.nn.Parameter(w.clone())
    p.grad, optimizer = torch.ones_like(p), fjoin.Optimizer([p], own)
    for _ in range(2):
        optimizer.step()
    for found in (stepped(step, step.init({"w": w}), [1.0, 1.0]).params["w"], p.detach()):
        torch.testing.assert_close(found.flatten(1), want)


def _sequence(optimizer: Any) -> Any:
    first = torchs.LinearLR(optimizer, 0.25, 1.0, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own SequentialLR calls its parts in a way that they warn of
        return torchs.SequentialLR(optimizer, [first, torchs.CosineAnnealingLR(optimizer, 20)], [4])


# Ours, and torch's from a learning rate of 0.1.
CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "linear": (tx.linear(0.1, 0.02, 30), lambda o: torchs.LinearLR(o, 1.0, 0.2, 30)),
    "cosine": (tx.cosine(0.1, 40, end=0.01), lambda o: torchs.CosineAnnealingLR(o, 40, eta_min=0.01)),
    "warmup_cosine": (tx.warmup_cosine(0.1, 4, 24), _sequence),
    "warmup": (tx.warmup(4, tx.cosine(0.1, 20)), _sequence),
    # Of one's own, with the numbers of Python.
    "a ramp": (lambda step: 0.1 * min(1.0, (step + 1) / 7), lambda o: torchs.LambdaLR(o, lambda s: min(1.0, (s + 1) / 7))),
}  # fmt: skip
# Those of torch alone.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [5, 20], 0.5),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, 40, cycle_momentum=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_match_torch(name: str) -> None:
    ours, torchs_ = CASES[name]
    steps = 24 if "warmup" in name else 40  # behind its end torch's cosine goes up again
    table = tx.from_torch_scheduler(torchs_, 0.1, steps)
    for step in range(steps):
        assert abs(ours(step) - table(step)) < 1e-15, step
    assert ours(steps + 7) == ours(steps + 8), "constant from the end on"


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_training_with_it(name: str) -> None:
    ours, torchs_ = CASES[name] if name in CASES else (None, OTHERS[name])
    params = {k: v for k, v in params_like().items() if v.numel()}
    grads = [{k: v for k, v in params_like(10 + i).items() if v.numel()} for i in range(20)]
    expected = optim.run(
        lambda ps: torch.optim.AdamW(ps, 0.1), list(params.values()), [list(g.values()) for g in grads], torchs_
    )
    for schedule in filter(None, (ours, tx.from_torch_scheduler(torchs_, 0.1, 20))):
        p, opt = params, tx.adamw(schedule)
        state = opt.init(p)
        for g in grads:
            p, state = opt.step(p, g, state)
        assert max_diff([p[k] - params[k] for k in p], expected) < 1e-12


def test_schedules_take_numbers_and_tensors() -> None:
    for schedule in (ours for name, (ours, _) in CASES.items() if name != "a ramp"):
        for step in range(8):
            assert schedule(step) == schedule(torch.tensor(float(step))) and schedule(step).dtype == torch.float64
        steps = torch.arange(8.0)
        assert torch.equal(torch.func.vmap(schedule)(steps), torch.stack([schedule(s) for s in steps]))


def test_a_table_takes_several_steps_at_once() -> None:
    rate = tx.from_torch_scheduler(lambda o: torchs.StepLR(o, 1, 0.5), 1.0, 2)
    assert rate(torch.arange(4).view(2, 2)).tolist() == [[1.0, 0.5], [0.5, 0.5]]
