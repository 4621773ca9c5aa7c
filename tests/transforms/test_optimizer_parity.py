"""Optimizers against torch.optim over 100 steps of identical gradients, for every combination of options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import params_like
from oracle import optim
from torch import Tensor

from fjoin import transforms as tx

STEPS = 100
BETAS = [(0.9, 0.999), (0.5, 0.9)]
NO_YES = [False, True]


def _all(**values: list[Any]) -> Iterator[dict[str, Any]]:
    """Every combination of options."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


class Kind(NamedTuple):
    ours: Any
    torchs: Any
    options: list[dict[str, Any]]
    kernel: dict[str, Any] | None  # how torch is told to use the kernel that ours runs; None where torch has none
    matrices: bool = False


ADAM = list(_all(lr=[0.01], betas=BETAS, eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], amsgrad=NO_YES, maximize=NO_YES))
SGD = _all(
    lr=[0.1], momentum=[0.0, 0.9], dampening=[0.0, 0.5], weight_decay=[0.0, 0.1], nesterov=NO_YES, maximize=NO_YES
)
FUSED, FOREACH = {"fused": True}, {"foreach": True}
KINDS = {
    "sgd": Kind(
        tx.sgd, torch.optim.SGD,
        [o for o in SGD if not (o["nesterov"] and (o["momentum"] == 0 or o["dampening"] != 0))], FUSED,
    ),
    "adam": Kind(tx.adam, torch.optim.Adam, ADAM, FUSED),
    "adamw": Kind(tx.adamw, torch.optim.AdamW, ADAM, FUSED),
    "adagrad": Kind(
        tx.adagrad, torch.optim.Adagrad,
        list(_all(lr=[0.1], lr_decay=[0.0, 0.1], weight_decay=[0.0, 0.1], initial_accumulator_value=[0.0, 0.5],
                  eps=[1e-10, 1e-3], maximize=NO_YES)), FOREACH,
    ),
    "adadelta": Kind(
        tx.adadelta, torch.optim.Adadelta,
        list(_all(lr=[1.0, 0.1], rho=[0.9, 0.5], eps=[1e-6, 1e-3], weight_decay=[0.0, 0.1], maximize=NO_YES)), FOREACH,
    ),
    "adamax": Kind(
        tx.adamax, torch.optim.Adamax,
        list(_all(lr=[0.01], betas=BETAS, eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], maximize=NO_YES)), FOREACH,
    ),
    "rmsprop": Kind(
        tx.rmsprop, torch.optim.RMSprop,
        list(_all(lr=[0.01], alpha=[0.99, 0.5], eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], momentum=[0.0, 0.9],
                  centered=NO_YES, maximize=NO_YES)), FOREACH,
    ),
    "rprop": Kind(
        tx.rprop, torch.optim.Rprop,
        list(_all(lr=[0.01], etas=[(0.5, 1.2), (0.1, 3.0)], step_sizes=[(1e-6, 50), (0.005, 0.02)], maximize=NO_YES)),
        FOREACH,
    ),
    "nadam": Kind(
        tx.nadam, torch.optim.NAdam,
        list(_all(lr=[0.01], betas=BETAS, eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], momentum_decay=[4e-3, 0.1],
                  decoupled_weight_decay=NO_YES, maximize=NO_YES)), FOREACH,
    ),
    "radam": Kind(
        tx.radam, torch.optim.RAdam,
        list(_all(lr=[0.01], betas=[*BETAS, (0.5, 0.6)], eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], decoupled_weight_decay=NO_YES,
                  maximize=NO_YES)), FOREACH,
    ),
    "asgd": Kind(
        tx.asgd, torch.optim.ASGD,
        list(_all(lr=[0.1], lambd=[1e-4, 0.1], alpha=[0.75, 0.5], t0=[1e6, 10.0], weight_decay=[0.0, 0.1],
                  maximize=NO_YES)), {"foreach": False},
    ),
    "adafactor": Kind(
        tx.adafactor, torch.optim.Adafactor,
        list(_all(lr=[0.05], beta2_decay=[-0.8, -0.5], eps=[(None, 1e-3), (1e-2, 0.5)], d=[1.0, 2.0],
                  weight_decay=[0.0, 0.1], maximize=NO_YES)), None,
    ),
    "muon": Kind(
        tx.muon, torch.optim.Muon,
        list(_all(lr=[0.05], weight_decay=[0.0, 0.1], momentum=[0.95, 0.5], nesterov=NO_YES, ns_steps=[5, 3],
                  adjust_lr_fn=[None, "original", "match_rms_adamw"])), None, matrices=True,
    ),
}  # fmt: skip


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
