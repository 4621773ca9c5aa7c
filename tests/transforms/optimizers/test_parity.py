"""Optimizers against torch.optim, for every combination of options, and optax: over 100 steps of identical gradients.

Optax without amsgrad: it takes its maximum after the bias correction, and torch before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import params_like
from tests.oracle import optax_run, optim
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
    """step, on a tree: equal to the bit to torch.optim with the same kernel.

    At equal alignment: a kernel's vector loop and its scalar tail round differently, and which of them
    serves an element depends on where it lies in the buffer.
    """
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


OPTAX_SHAPES = {"a": (5, 3), "b": (4,), "c": (), "d": (2, 3, 4)}
DECAYS = [0.0, 0.1]


def _relative(lr: float) -> Callable[[Any], Any]:
    """The rate of torch's Adafactor, in float64."""
    return lambda count: jnp.minimum(lr, 1 / jnp.sqrt(jnp.asarray(count, jnp.float64) + 1))


OPTAX: list[tuple[str, tx.Optimizer, Any]] = [
    *((f"lion {wd}", tx.lion(0.01, (0.8, 0.95), wd), optax.lion(0.01, 0.8, 0.95, weight_decay=wd)) for wd in DECAYS),
    *((f"lamb {wd}", tx.lamb(0.01, weight_decay=wd), optax.lamb(0.01, weight_decay=wd)) for wd in DECAYS),
    *((f"adamw {wd}", tx.adamw(0.01, weight_decay=wd), optax.adamw(0.01, weight_decay=wd)) for wd in DECAYS),
    ("adam", tx.adam(0.01, (0.8, 0.9), 1e-3), optax.adam(0.01, 0.8, 0.9, 1e-3)),
    ("sgd", tx.sgd(0.1, momentum=0.9, nesterov=True), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    ("adamax", tx.adamax(0.01), optax.adamax(0.01)),
    ("adafactor", tx.adafactor(0.05, eps=(1e-15, 1e-3)), optax.adafactor(_relative(0.05), min_dim_size_to_factor=1, eps=1e-30)),
]  # fmt: skip


def _optax_grads(steps: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(0)
    trees = [
        {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in OPTAX_SHAPES.items()} for _ in range(steps + 1)
    ]
    return trees[0], trees[1:]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("optimizer", "theirs"), [pytest.param(a, b, id=name) for name, a, b in OPTAX])
def test_optax_gives_the_same_steps(optimizer: tx.Optimizer, theirs: Any) -> None:
    start, grads = _optax_grads(100)
    params, state = start, optimizer.init(start)
    for step in grads:
        params, state = optimizer.step(params, step, state)
    want = optax_run.run(theirs, list(start.values()), [list(step.values()) for step in grads])
    for path, expected in zip(start, want, strict=True):
        # optax computes the decay rate of its adafactor in float32.
        room = 1e-7 if optimizer.spec.name == "adafactor" else 1e-12
        assert (params[path] - start[path] - expected).abs().max() < room, path


def test_clipping() -> None:
    """Where they clip: torch, and so this, divides by the norm plus 1e-6, and optax by the norm."""
    _, (grads,) = _optax_grads(1)
    for ours, theirs, room in [
        (tx.clip_by_value(0.3), optax.clip(0.3), 0.0),
        (tx.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5), 1e-6),
        (tx.clip_by_global_norm(1e3), optax.clip_by_global_norm(1e3), 0.0),
    ]:
        got, _ = ours.update(grads, ())
        want = optax_run.apply(theirs, list(grads.values()))
        assert max((a - b).abs().max().item() for a, b in zip(got.values(), want, strict=True)) <= room
