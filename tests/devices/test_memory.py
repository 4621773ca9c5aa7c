"""The most bytes of a step on a device, in units of the parameters: 16 of more than 25 MiB, so that gradients are sent directly."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fjoin import transforms as tx
from fjoin.buckets import GradBuffer
from fjoin.transforms.optimizers import _checks as _checked
from tests.devices.kernels import Make, steps
from tests.devices.memory import Memory

SIDE, COUNT = 2600, 16
SHAPES = {f"p{i}": (SIDE, SIDE) for i in range(COUNT)}
UNIT = SIDE * SIDE * COUNT * 4
MEAN = tx.mean("data")
INT8 = tx.compress(tx.int8(), tx.mean("data"))
# Each with the bytes between steps, and the most within a step: parameters, states and gradients, and what is beside them.
LIMITS: dict[str, tuple[Make, float, float]] = {
    "sgd": (lambda: tx.fuse(MEAN, tx.sgd(0.1)), 1, 2),
    "adamw": (lambda: tx.fuse(MEAN, tx.adamw(0.1)), 3, 4),
    # The codes of a bucket, and its decoded messages.
    "bfloat16": (lambda: tx.fuse(tx.compress(torch.bfloat16, MEAN), tx.sgd(0.1)), 1, 2.3),
    # Old errors and new ones, until the device has judged the step.
    "fed back": (lambda: tx.fuse(tx.error_feedback(INT8), tx.sgd(0.1)), 2, 4.4),
    # Copies of 64 MiB of parameters at a time and of their states, and the temporaries of torch's kernels.
    "lion": (lambda: tx.fuse(MEAN, tx.lion(0.1)), 2, 3.7),
    "adagrad": (lambda: tx.fuse(MEAN, tx.adagrad(0.1)), 2, 3.8),
    "muon": (lambda: tx.fuse(MEAN, tx.muon(0.1)), 2, 4),
    "lamb": (lambda: tx.fuse(MEAN, tx.lamb(0.1)), 3, 5.2),
}


def bytes_of(make: Make) -> tuple[float, float]:
    """Those before the third step, and the most of it."""
    memory = Memory()
    steps(make, SHAPES, [1.0, 1.0, 1.0], memory)
    return memory.start / UNIT, memory.peak / UNIT


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_needs_no_more_memory_than_this(name: str) -> None:
    make, between, most = LIMITS[name]
    start, peak = bytes_of(make)
    assert start == pytest.approx(between, abs=0.01) and peak <= most + 0.01


def test_copies_of_all_parameters_are_found() -> None:
    with mock.patch.object(_checked, "_PORTION", 2**40):
        assert bytes_of(LIMITS["lion"][0])[1] > LIMITS["lion"][2] + 1


def test_gradients_that_are_kept_are_found() -> None:
    with mock.patch.object(GradBuffer, "free", lambda out: None):
        assert bytes_of(LIMITS["sgd"][0])[0] == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("name", ["lion", "adagrad", "rmsprop", "muon", "adadelta"])
@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_portions_step_as_all_at_once_and_a_bad_step_changes_nothing(name: str, bad: float) -> None:
    opt = getattr(tx, name)(0.1)
    torch.manual_seed(0)
    params = [torch.randn(4, 4) for _ in range(5)]
    grads = [torch.full((4, 4), torch.nan) if bad else torch.randn(4, 4) for _ in params]

    def run(portion: int) -> tuple[list[torch.Tensor], list[float]]:
        own, states = [p.clone() for p in params], [opt.init_param(p) for p in params]
        states = [state._replace(step=states[0].step) for state in states]  # of one age: they share the count
        with mock.patch.object(_checked, "_PORTION", portion):
            opt.step_params_(own, [g.clone() for g in grads], states, found_inf=torch.tensor(bad))
        return own, [
            float(states[0].step),
            *(float(x.double().sum()) for state in states for x in state[1:] if x is not None),
        ]

    whole, parts = run(2**26), run(1)
    assert all(map(torch.equal, whole[0], parts[0])) and whole[1] == parts[1]
    assert whole[1][0] == 1.0 - bad and all(map(torch.equal, whole[0], params)) == bool(bad)
