"""Optimizers on 16-bit parameters: a step in float32 that is rounded once, in the formula as in the kernel; finite where torch is."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.optimizers import master_of
from tests.optimizer_table import OPTIMIZERS
from tests.oracle import optim
from tests.parity_table import KINDS

DTYPES = [torch.float16, torch.bfloat16]
SCALES = [0.0, 1e-7, 1e-4, 1e-2, 1.0]
NO_EPS: dict[str, dict[str, Any]] = {
    name: {"eps": (0.0, 1e-3) if name == "adafactor" else 0.0}
    for name in KINDS if name not in ("sgd", "rprop", "asgd")
}  # fmt: skip
CASES = [(name, {}) for name in KINDS] + list(NO_EPS.items())


def _problem(dtype: torch.dtype, scale: float, steps: int = 8) -> tuple[Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(0)
    param = torch.randn(4, 16, generator=g).to(dtype)
    return param, [(scale * torch.randn(4, 16, generator=g)).to(dtype) for _ in range(steps)]


def _ulp(x: Tensor, least: float = 0.25) -> Tensor:
    return torch.finfo(x.dtype).eps * x.float().abs().clamp(min=least)


def _pure(opt: tx.Optimizer, param: Tensor, grads: list[Tensor]) -> tuple[Tensor, Any]:
    new, state = param, opt.init_param(param)
    for grad in grads:
        new, state = opt.step_param(new, grad, state)
    return new - param, state


def _in_place(opt: tx.Optimizer, param: Tensor, grads: list[Tensor]) -> tuple[Tensor, Any]:
    new, state = param.clone(), opt.init_param(param)
    for grad in grads:
        opt.step_param_(new, grad.clone(), state)
    return new - param, state


@pytest.mark.sample(3)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: value if isinstance(value, str) else str(bool(value)))  # fmt: skip
def test_finite_where_torch_optim_is(name: str, options: dict[str, Any], dtype: torch.dtype, scale: float) -> None:
    param, grads = _problem(dtype, scale)
    opt = KINDS[name].ours(**options)
    (torchs,) = optim.run(lambda params: KINDS[name].torchs(params, **options), [param], [[g] for g in grads])
    for moved, _ in (_pure(opt, param, grads), _in_place(opt, param, grads)):
        assert bool((torch.isfinite(moved) | ~torch.isfinite(torchs)).all())


@pytest.mark.sample(3)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("frozen", "muon", "partition")] + ["muon"])
def test_formula_matches_the_kernel(name: str, dtype: torch.dtype, scale: float) -> None:
    """Every optimizer with default options: parameter and state."""
    param, grads = _problem(dtype, scale)
    opt = tx.muon(0.1) if name == "muon" else OPTIMIZERS[name][0]()
    (moved, state), (moved_, state_) = _pure(opt, param, grads), _in_place(opt, param, grads)
    assert torch.isfinite(moved).all()
    assert ((moved.float() - moved_.float()).abs() <= _ulp(param)).all()
    for one, other in zip(optree.tree_leaves(state), optree.tree_leaves(state_), strict=True):
        # A master copy that has come near zero keeps the rounding of the larger values that it had.
        size = torch.maximum(one.abs(), param.abs().to(one.dtype)) if one is master_of(state) else one
        assert ((one.float() - other.float()).abs() <= 2 * _ulp(size, least=torch.finfo(one.dtype).tiny)).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("adafactor", "muon")])
def test_step_matches_torch_optim_in_float32_rounded_once(name: str, dtype: torch.dtype, scale: float) -> None:
    """Adafactor's own epsilon is that of the 16-bit dtype, and Muon multiplies in bfloat16; see below for both."""
    param, grads = _problem(dtype, scale)
    moved, _ = _pure(KINDS[name].ours(), param, grads)
    want = optim.run_rounded(lambda params: KINDS[name].torchs(params), param, grads)
    assert ((moved.float() - want.float()).abs() <= _ulp(param)).all()
