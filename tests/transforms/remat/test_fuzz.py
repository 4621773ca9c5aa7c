"""Random functions: under `remat` they give and leave what they give and leave without it, to the bit."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from .fuzz import Case, case_of, outcome

pytestmark = pytest.mark.usefixtures("host")
CASES, SAMPLE = 4000, 120
# Documented limits, each with the types of its errors; others are failures.
REFUSED: tuple[tuple[type[Exception], str], ...] = (
    (ValueError, "runs .* on tensors without values"),
    (TypeError, "in which no tensors are looked for"),
    # torch.func inside a block, beside what torch.func does not take.
    (RuntimeError, "that would mutate a captured Tensor|must override the setup_context"),
)


def refused(error: Exception) -> bool:
    """Whether an error is a documented limit."""
    return any(isinstance(error, kind) and re.search(text, str(error)) for kind, text in REFUSED)


def differences(got: dict[str, Any], want: dict[str, Any], rounded: bool) -> list[str]:
    """The names of values that are not equal to the bit.

    Args:
        got, want: Values by name.
        rounded: Whether gradients may differ by rounding, as under vmap, where products are batched in another
            order, and in functions that use torch.func, whose gradients are added in another order.
    """
    wrong = [name for name in want if not _equal(got[name], want[name])]
    return [
        name for name in wrong if not (rounded and "grad" in name and torch.allclose(got[name], want[name], 1e-4, 1e-5))
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(b, Tensor):
        return isinstance(a, Tensor) and a.dtype is b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def check(case: Case) -> str:
    """Compare a case with the plain function: "same", "refused", or "unlike" where the plain function fails."""
    try:
        want = outcome(case, plain=True)
    except Exception:
        return "unlike"
    try:
        got = outcome(case, plain=False)
    except (TypeError, ValueError, RuntimeError) as error:
        if refused(error):
            return "refused"
        raise
    wrong = differences(got, want, rounded=case.mode == "rows" or bool({"force", "rows"} & {*case.ops}))
    assert not wrong, f"{case}: {wrong}; {[(got[name], want[name]) for name in wrong][:2]}"
    return "same"


def _check(seeds: range) -> dict[str, int]:
    counts = dict.fromkeys(("same", "refused", "unlike"), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            counts[check(case_of(seed))] += 1
    return counts


def test_random_functions() -> None:
    counts = _check(range(SAMPLE))
    assert counts["same"] > SAMPLE // 2


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many_random_functions(part: int) -> None:
    each = CASES // 8
    counts = _check(range(SAMPLE + part * each, SAMPLE + (part + 1) * each))
    assert counts["same"] > each // 2
