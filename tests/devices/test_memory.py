"""The most bytes of a step on a device, in units of the parameters: 16 of more than 25 MiB, so that gradients are sent directly."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fjoin import transforms as tx
from fjoin.buckets import GradBuffer
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
    # The formula's temporaries, of one parameter at a time.
    "adagrad": (lambda: tx.fuse(MEAN, tx.adagrad(0.1)), 2, 3.8),
    "muon": (lambda: tx.fuse(MEAN, tx.muon(0.1)), 2, 4),
    "lamb": (lambda: tx.fuse(MEAN, tx.lamb(0.1)), 3, 5.2),
    # Copies of the parameters and the states, since torch's kernel takes no `found_inf`, and its temporaries.
    "lion": (lambda: tx.fuse(MEAN, tx.lion(0.1)), 2, 6),
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


def test_gradients_that_are_kept_are_found() -> None:
    with mock.patch.object(GradBuffer, "free", lambda out: None):
        assert bytes_of(LIMITS["sgd"][0])[0] == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("name", ["lion", "adagrad", "rmsprop", "muon", "adadelta"])
@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_a_bad_step_changes_nothing_and_another_one_is_as_without_the_flag(name: str, bad: float) -> None:
    opt = getattr(tx, name)(0.1)
    torch.manual_seed(0)
    params = [torch.randn(4, 4) for _ in range(5)]
    grads = [torch.full((4, 4), torch.nan) if bad else torch.randn(4, 4) for _ in params]

    def run(found_inf: torch.Tensor | None) -> tuple[list[torch.Tensor], list[float]]:
        own, states = [p.clone() for p in params], opt.init(params)  # they share the count
        opt.step_params_(own, [g.clone() for g in grads], states, found_inf=found_inf)
        return own, [float(x.double().sum()) for state in states for x in state if x is not None]

    flagged, plain = run(torch.tensor(bad)), run(None)
    same = all(map(torch.equal, flagged[0], params if bad else plain[0]))
    assert same and flagged[1][0] == 1.0 - bad and (flagged[1] == plain[1]) != bool(bad)
