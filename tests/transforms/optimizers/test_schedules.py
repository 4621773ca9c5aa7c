"""Schedules against torch's schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from fjoin import transforms as tx
from tests.helpers import max_diff, params_like
from tests.oracle import optim


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
