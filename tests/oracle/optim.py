"""torch.optim and optax, fed given gradients. No fjoin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def run(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], start: Sequence[Tensor], grads: Sequence[Sequence[Tensor]],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The displacement of each parameter after all steps."""
    params = [p.clone().requires_grad_() for p in start]
    optimizer = make(params)
    schedule = scheduler(optimizer) if scheduler else None
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [p.detach() - s for p, s in zip(params, start, strict=True)]


def clip(grads: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """torch.nn.utils.clip_grad_norm_ on copies."""
    params = [torch.zeros_like(g, requires_grad=True) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    return [p.grad for p in params if p.grad is not None]


def run_rounded(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], start: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    """The displacement of a 16-bit parameter whose steps are computed in float32 and rounded, with the state, once each."""
    dtype = start.dtype
    param = start.float().requires_grad_()
    optimizer = make([param])
    for grad in grads:
        param.grad = grad.float()
        optimizer.step()
        for held in (param.data, *optimizer.state[param].values()):
            if isinstance(held, Tensor) and held.dim():
                held.copy_(held.to(dtype))
    return param.detach().to(dtype) - start


def run_scaled(start: Tensor, grads: Sequence[Tensor], lr: float, **options: Any) -> tuple[list[Tensor], list[float]]:
    """The parameter and torch.amp.GradScaler's scale after each step of SGD with momentum, on gradients of the unscaled loss."""
    p = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **options)
    params, scales = [], []
    for g in grads:
        scaled = scaler.scale(torch.ones(()))
        p.grad = g * scaled
        scaler.step(optimizer)
        scaler.update()
        params.append(p.detach().clone())
        scales.append(scaler.get_scale())
    return params, scales


def run_optax(transform: Any, start: Any, grads: list[Any]) -> Any:
    """The displacement of each parameter of a tree after all steps of optax, in float64."""
    import jax
    import jax.numpy as jnp
    import optax

    with jax.enable_x64(True):
        first = jax.tree.map(lambda p: jnp.asarray(p.numpy()), start)
        params, state = first, transform.init(first)
        for step in grads:
            updates, state = transform.update(jax.tree.map(lambda g: jnp.asarray(g.numpy()), step), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda p, s: torch.from_numpy(np.array(p - s)), params, first)
