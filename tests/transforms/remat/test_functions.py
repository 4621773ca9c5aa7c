"""Functions of all kinds: under `remat` they give and leave what they give and leave without it, to the bit."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fjoin import transforms as tx
from tests.helpers import same_bits

from .functions import AROUND, POLICIES, RESULTS, WRAPS, Case, case_of, outcome
from .operations import OPS

pytestmark = pytest.mark.usefixtures("host")
CASES, SAMPLE = 4000, 60
MODES = ("plain", "twice", "grad", "jvp", "rows")
# Documented limits, each with the types of its errors; others are failures.
REFUSED: tuple[tuple[type[Exception], str], ...] = (
    (ValueError, "runs .* on tensors without values"),
    (TypeError, "in which no tensors are looked for"),
    # torch.func inside a block, beside what torch.func does not take.
    (RuntimeError, "that would mutate a captured Tensor|must override the setup_context"),
    (RuntimeError, "TorchScript interpreter|don't yet support saved tensor hooks"),
)


def refused(error: Exception) -> bool:
    """Whether an error is a documented limit."""
    return any(isinstance(error, kind) and re.search(text, str(error)) for kind, text in REFUSED)


def differences(got: dict[str, Any], want: dict[str, Any], rounded: bool) -> list[str]:
    """The names of values that are not equal to the bit; `rounded`: or near, as under torch.func, which adds in another order."""
    wrong = [name for name in want if not same_bits(got[name], want[name])]
    return [
        name for name in wrong if not (rounded and "grad" in name and torch.allclose(got[name], want[name], 1e-4, 1e-5))
    ]


def check(case: Case) -> str:
    """Compare a case with the plain function: "same", "refused", or "unlike" where the plain function fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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


@pytest.mark.sample(40)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPS)
def test_each_operation(name: str, policy: str, mode: str) -> None:
    assert check(Case((name, "sin", name), policy=policy, mode=mode)) == "same" or mode in ("grad", "jvp", "rows")


# Reads that look like writes; a draw that is kept; a region in another one; state before what only the other kind of region takes.
TOGETHER = [
    "asks_leaf sin", "numpy sin", "data_ptr sin", "by_inner sin", "rand sin dropout", "again force",
    "calls dropout force",
]  # fmt: skip


@pytest.mark.parametrize("policy", ["nothing", "dots", "host"])
@pytest.mark.parametrize("ops", TOGETHER)
def test_operations_together(ops: str, policy: str) -> None:
    assert check(Case(tuple(ops.split()), policy=policy)) == "same"
    assert check(Case(tuple(ops.split()), policy=policy, mode="grad")) in ("same", "unlike")


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", ["nothing", "own"])
@pytest.mark.parametrize("result", RESULTS)
def test_each_result(result: str, policy: str) -> None:
    for mode in ("plain", "twice", "grad", "rows"):
        want = "refused" if result == "object" and mode in ("grad", "rows") else "same"
        assert check(Case(("linear", "sin"), result, policy, mode=mode)) == want


@pytest.mark.parametrize("policy", ["nothing", "dots", "own"])
@pytest.mark.parametrize("around", [name for name in AROUND if name != "autocast"])
def test_each_surrounding(around: str, policy: str) -> None:
    """A second run has the contexts of the first, wherever the backward pass is called."""
    ops = {"another device": ("device", "sin"), "cached": ("cached", "sin")}.get(
        around, ("sin", "arange", "asks_grad_mode", "zeros")
    )
    for mode in ("plain", "grad"):
        assert check(Case(ops, policy=policy, mode=mode, around=around)) == "same"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "ops", [("norm", "dropout", "seen", "calls", "rows_anew"), ("mean_anew", "submodule", "own generator", "training")]
)
@pytest.mark.parametrize("wrap", WRAPS)
def test_each_wrap(wrap: str, ops: tuple[str, ...]) -> None:
    """State changes once, and random numbers go on as after one run, however a module is reached."""
    for mode in ("plain", "grad", "vjp"):
        found = check(Case(ops, wrap=wrap, mode=mode))
        assert found == "same" or (mode != "plain" and "norm" in ops)


@pytest.mark.parametrize("policy", ["nothing", "dots", "host"])
@pytest.mark.parametrize("wrap", ["remat", "argument"])
@pytest.mark.parametrize("name", ["linear", "own form", "lstm"])  # the weights of an LSTM are in a list, too
def test_parameters_that_functional_call_replaces(name: str, wrap: str, policy: str) -> None:
    assert check(Case((name, "sin", "scale"), policy=policy, wrap=wrap, mode="call")) == "same"


@pytest.mark.xfail(
    strict=True,
    reason="autograd clones what mul_ overwrites, once more in the second run, and values are found by number",
)
def test_clones_that_are_kept_beside_writes_under_func() -> None:
    cell, x = nn.GRUCell(4, 4), torch.linspace(-1, 1, 12).view(3, 4)

    def f(x: Tensor) -> Tensor:
        h = cell(x, x.sin())
        return cell(h, h.sin()).sum()

    kept = tx.remat(f, lambda op, *args, **kwargs: "clone" in str(op))
    torch.testing.assert_close(torch.func.grad(kept)(x), torch.func.grad(f)(x))


def _check(seeds: range) -> dict[str, int]:
    counts = dict.fromkeys(("same", "refused", "unlike"), 0)
    for seed in seeds:
        counts[check(case_of(seed))] += 1
    return counts


def test_random_functions() -> None:
    counts = _check(range(SAMPLE))
    assert counts["same"] > SAMPLE // 2, counts


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many_random_functions(part: int) -> None:
    each = CASES // 8
    counts = _check(range(SAMPLE + part * each, SAMPLE + (part + 1) * each))
    assert counts["same"] > each // 2, counts
