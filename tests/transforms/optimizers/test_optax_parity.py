"""Optimizers and clipping against optax, over 100 steps of identical gradients.

Without amsgrad: optax takes its maximum after the bias correction, and torch before.
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
from tests.oracle import optax_run

SHAPES = {"a": (5, 3), "b": (4,), "c": (), "d": (2, 3, 4)}
DECAYS = [0.0, 0.1]


def _relative(lr: float) -> Callable[[Any], Any]:
    """The rate of torch's Adafactor, in float64."""
    return lambda count: jnp.minimum(lr, 1 / jnp.sqrt(jnp.asarray(count, jnp.float64) + 1))


CASES: list[tuple[str, tx.Optimizer, Any]] = [
    *((f"lion {wd}", tx.lion(0.01, (0.8, 0.95), wd), optax.lion(0.01, 0.8, 0.95, weight_decay=wd)) for wd in DECAYS),
    *((f"lamb {wd}", tx.lamb(0.01, weight_decay=wd), optax.lamb(0.01, weight_decay=wd)) for wd in DECAYS),
    *((f"adamw {wd}", tx.adamw(0.01, weight_decay=wd), optax.adamw(0.01, weight_decay=wd)) for wd in DECAYS),
    ("adam", tx.adam(0.01, (0.8, 0.9), 1e-3), optax.adam(0.01, 0.8, 0.9, 1e-3)),
    ("sgd", tx.sgd(0.1, momentum=0.9, nesterov=True), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    ("adamax", tx.adamax(0.01), optax.adamax(0.01)),
    ("adafactor", tx.adafactor(0.05, eps=(1e-15, 1e-3)), optax.adafactor(_relative(0.05), min_dim_size_to_factor=1, eps=1e-30)),
]  # fmt: skip


def _grads(steps: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(0)
    trees = [{k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in SHAPES.items()} for _ in range(steps + 1)]
    return trees[0], trees[1:]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("optimizer", "theirs"), [pytest.param(a, b, id=name) for name, a, b in CASES])
def test_the_same_steps(optimizer: tx.Optimizer, theirs: Any) -> None:
    start, grads = _grads(100)
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
    _, (grads,) = _grads(1)
    for ours, theirs, room in [
        (tx.clip_by_value(0.3), optax.clip(0.3), 0.0),
        (tx.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5), 1e-6),
        (tx.clip_by_global_norm(1e3), optax.clip_by_global_norm(1e3), 0.0),
    ]:
        got, _ = ours.update(grads, ())
        want = optax_run.apply(theirs, list(grads.values()))
        assert max((a - b).abs().max().item() for a, b in zip(got.values(), want, strict=True)) <= room
