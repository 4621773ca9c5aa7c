"""Optimizers against torch.optim, for every combination of options, and optax: over many steps of identical gradients."""

from __future__ import annotations

from typing import Any

import optax
import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff, params_like, raises_text
from tests.oracle import optim
from tests.parity_table import KINDS, Kind

STEPS = 100


def _cases(kernels: bool) -> list[Any]:
    return [
        pytest.param(kind, options, id=f"{kind}-" + "-".join(f"{k}={v}" for k, v in options.items() if v))
        for kind, row in KINDS.items() for options in row.options if row.kernel or not kernels
    ]  # fmt: skip


def _problem(kind: Kind, dtype: torch.dtype, even: bool = False) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters and gradients. even: of sizes that fill whole vector registers, also one after the other."""
    params = {k: v for k, v in params_like(0, dtype).items() if v.numel()}
    g = torch.Generator().manual_seed(1)
    if even or kind.matrices:
        shapes = {"a": (16, 16), "b": (64,)} if even else {"a": (3, 5), "b": (6, 2), "c": (4, 4)}
        params = {k: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for k, shape in shapes.items()}
    grads = [
        {k: torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype) for k, p in params.items()}
        for _ in range(STEPS)
    ]
    return params, grads


def _expected(kind: Kind, options: dict[str, Any], problem: Any, settings: dict[str, Any]) -> list[Tensor]:
    params, grads = problem
    return optim.run(
        lambda ps: kind.torchs(ps, **settings, **options), list(params.values()), [list(g.values()) for g in grads]
    )


@pytest.mark.sample(48)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), _cases(kernels=True))
def test_the_kernel_is_torchs_own(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """step, on a tree: torch.optim to the bit, at equal alignment, since a kernel's vector loop and its tail round differently."""
    kind = KINDS[name]
    params, grads = problem = _problem(kind, dtype, even=True)
    start, opt = params, kind.ours(**options)
    state = opt.init(params)
    for g in grads:
        params, state = opt.step(params, g, state)
    moved = [params[k] - start[k] for k in start]
    want = _expected(kind, options, problem, kind.kernel or {})
    assert all(torch.equal(a, b) for a, b in zip(moved, want, strict=True))


@pytest.mark.sample(96)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-14)])
@pytest.mark.parametrize(("name", "options"), _cases(kernels=False))
def test_the_pure_formula(name: str, options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """step_param: torch.optim's loop over tensors, to the tolerance per unit of displacement."""
    kind = KINDS[name]
    params, grads = problem = _problem(kind, dtype)
    opt = kind.ours(**options)
    own = {k: (p, opt.init_param(p)) for k, p in params.items()}
    for g in grads:
        own = {k: opt.step_param(p, g[k], s) for k, (p, s) in own.items()}
    want = _expected(kind, options, problem, {} if kind.matrices else {"foreach": False})
    for k, expected in zip(params, want, strict=True):
        moved, expected = (own[k][0] - params[k]).double(), expected.double()
        # Rounding of the parameter itself, once per step, is not the formula's.
        room = tolerance * (expected.abs().max() + params[k].abs().max() + 1) * STEPS / 2
        assert (moved - expected).abs().max() <= room


# What torch has not.
OPTAX = [
    (tx.lion(0.01, (0.8, 0.95), 0.1), optax.lion(0.01, 0.8, 0.95, weight_decay=0.1)),
    (tx.lamb(0.01, weight_decay=0.1), optax.lamb(0.01, weight_decay=0.1)),
]


@pytest.mark.parametrize(("optimizer", "theirs"), OPTAX, ids=["lion", "lamb"])
def test_optax_gives_the_same_steps(optimizer: tx.Optimizer, theirs: Any) -> None:
    start, *grads = ({k: v for k, v in params_like(seed).items() if v.numel()} for seed in range(31))
    params, state = start, optimizer.init(start)
    for step in grads:
        params, state = optimizer.step(params, step, state)
    for path, expected in optim.run_optax(theirs, start, grads).items():
        assert (params[path] - start[path] - expected).abs().max() < 1e-12, path


@pytest.mark.parametrize("name", KINDS)
def test_every_class_of_torch_has_a_counterpart(name: str) -> None:
    """One step with the defaults of the class gives the same result."""
    made = KINDS[name].torchs
    p, g = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    opt = tx.as_functional_optim(made)
    out, _ = opt.step({"p": p}, {"p": g}, opt.init({"p": p}))
    (want,) = optim.run(lambda ps: made(ps), [p], [[g]])
    assert max_diff(out["p"] - p, want) < 1e-6


def test_arguments_of_a_class_and_keys_of_ones_own() -> None:
    assert tx.as_functional_optim(torch.optim.Adam, 0.1, (0.5, 0.9), fused=True) == tx.adam(0.1, (0.5, 0.9))
    raises_text(TypeError, lambda: tx.as_functional_optim(torch.optim.SGD, learning_rate=0.1), "learning_rate")
    raises_text(ValueError, lambda: tx.as_functional_optim(torch.optim.SGD, lr=-1.0), "lr must be at least 0")
    words = "LBFGS", "register_functional_optim", "AdamW"
    raises_text(ValueError, lambda: tx.as_functional_optim(torch.optim.LBFGS), *words)
    tx.register_functional_optim("mine", lambda lr: tx.sgd(lr))
    assert tx.as_functional_optim("mine", 0.5) == tx.sgd(0.5)
    raises_text(ValueError, lambda: tx.register_functional_optim("mine", tx.adam), "'mine'", "already")
    raises_text(TypeError, lambda: tx.register_functional_optim("other", 3), "factory", "3")  # type: ignore[arg-type]
