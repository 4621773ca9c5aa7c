"""The numbers that a step gives to its kernels as they are launched: a captured graph of a device would repeat them for ever.

The table says which kernels get such numbers in a step that is not captured. In one that is, none does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.devices.kernels import SMALL, baked, captured, copied, steps
from tests.devices.test_graphs import ALL, REFUSED
from tests.devices.test_streams import PIPELINES

# Of any step: this rank's weight and the step's number go into the record by `full`, the weight into the start of backward by
# `full_like` and into the loss by `mul`, and the number is compared by `remainder`.
RECORD = {"full", "mul.Tensor", "remainder.Scalar"}
PLAIN = RECORD | {"full_like"}
ENCODED = RECORD | {"div.Tensor"}
VERDICTS: dict[str, set[str] | str] = {
    "mean": PLAIN,
    "mean, float64 rates": PLAIN,
    "bfloat16": ENCODED,
    "clipped": PLAIN,
    "int8": ENCODED,
    "fed back": ENCODED | {"add.Tensor", "div_.Tensor", "full_like"},
    "power_sgd": ENCODED | {"add.Tensor"},
    "zero": PLAIN,
    "zero, overlapped": PLAIN,
    "zero, int8 gather": PLAIN,
    "local": "other kernels",  # averages come in some steps only
    "skip": PLAIN,
    "accumulate": "other kernels",  # within a window, and at its end
    "state kept": PLAIN,
}


def verdict(found: list[str]) -> set[str] | str:
    if any(" kernels and " in line for line in found):
        return "other kernels"
    return {line.split(":")[2].strip() for line in found}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_stands_against_capture(name: str) -> None:
    make, options = PIPELINES[name]
    assert verdict(baked(make, bucket_bytes=40, **options)) == VERDICTS[name]


@pytest.mark.parametrize("name", ALL)
def test_no_step_copies_from_the_host(name: str) -> None:
    """Not even without a wait: a copy from memory that is not pinned goes through a buffer of the driver's."""
    make, options = ALL[name]
    *_, last = steps(make, SMALL, [1.0, 2.0, 3.0, 5.0], bucket_bytes=40, **options)
    assert last and not copied(last)


@pytest.mark.parametrize("name", [name for name in ALL if name not in REFUSED])
def test_a_captured_step_gets_no_number_that_changes_and_copies_nothing_from_the_host(name: str) -> None:
    make, options = ALL[name]
    first, second = captured(make, bucket_bytes=40, **options)
    assert repr(first) == repr(second) and len(first) > 20  # NaN is NaN
    assert not copied(first)


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
