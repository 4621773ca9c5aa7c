"""The numbers of the host that a step gives to its kernels as they are launched; the table says which kernels get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.devices.kernels import SMALL, baked, copied, steps
from tests.devices.test_streams import PIPELINES

# Of any step: this rank's weight and the step's number go into the record by `full`, the weight into the start of backward by
# `full_like` and into the loss by `mul`, and the number is compared by `ne`.
RECORD = {"full", "mul.Tensor", "ne.Scalar"}
PLAIN = RECORD | {"full_like"}
ENCODED = RECORD | {"div.Tensor"}
VERDICTS: dict[str, set[str] | str] = {
    "mean": PLAIN,
    "mean, float64 rates": PLAIN,
    "bfloat16": ENCODED,
    "clipped": PLAIN,
    "int8": ENCODED,
    "fed back": ENCODED,
    "power_sgd": ENCODED,
    "zero": PLAIN,
    "zero, int8 gather": PLAIN,
    "local": "other kernels",  # averages come in some steps only
    "skip": PLAIN,
    "accumulate": "other kernels",  # within a window, and at its end
    "state kept": PLAIN,
}


MORE: dict[str, tuple[Callable[[], tx.Pipeline], dict[str, Any]]] = {
    "loss scale": (lambda: tx.dynamic_loss_scale(tx.fuse(tx.mean("data"), tx.sgd(0.1)), 8.0, growth_interval=3), {}),
    "ema": (lambda: tx.fuse(tx.mean("data"), tx.adamw(0.1), after=tx.ema(0.9)), {}),
    "injected schedule": (lambda: tx.fuse(tx.mean("data"), tx.inject_hyperparameters(tx.adamw(tx.warmup_cosine(0.1, 2, 9)))), {}),
    "norm": (lambda: tx.fuse(tx.chain(tx.mean("data"), tx.record_norm()), tx.lion(0.01)), {}),
    "muon": (lambda: tx.fuse(tx.mean("data"), tx.partition({"[bd]": tx.sgd(0.1, momentum=0.5), "*": tx.muon(0.1)})), {}),
}  # fmt: skip
ALL = {**PIPELINES, **MORE}


def verdict(found: list[str]) -> set[str] | str:
    if any(" kernels and " in line for line in found):
        return "other kernels"
    return {line.split(":")[2].strip() for line in found}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_gives_no_more_numbers_of_the_host_to_its_kernels(name: str) -> None:
    make, options = PIPELINES[name]
    assert verdict(baked(make, bucket_bytes=40, **options)) == VERDICTS[name]


@pytest.mark.parametrize("name", ALL)
def test_no_step_copies_from_the_host(name: str) -> None:
    """Not even without a wait: a copy from memory that is not pinned goes through a buffer of the driver's."""
    make, options = ALL[name]
    *_, last = steps(make, SMALL, [1.0, 2.0, 3.0, 5.0], bucket_bytes=40, **options)
    assert last and not copied(last)


def _times(factor: Any) -> tx.Transform:
    """Gradients times a factor that changes in every step."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: g * factor(state) for path, g in grads.items()}, state + 1

    return tx.Transform(lambda params: torch.zeros((), device="meta"), update, needs=tx.Needs.PATHS)


def test_a_number_of_the_host_is_found_and_one_of_the_device_is_not() -> None:
    calls = [0.0]

    def of_host(state: Any) -> float:
        calls[0] += 1.0
        return calls[0]

    def of_device(state: Any) -> Any:
        return state

    def found(factor: Any) -> list[str]:
        lines = baked(lambda: tx.fuse(tx.chain(tx.mean("data"), _times(factor)), tx.sgd(0.1)))
        return [line for line in lines if line.startswith("aten::mul.Tensor") and "((4,)" in line]

    assert found(of_host) and not found(of_device)
