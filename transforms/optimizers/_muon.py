"""Muon."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..base import Tree, factory, named_leaves, whole_number
from ._kernels import from_kernel, zeros
from ._optimizer import Optimizer, rate_at
from ._schedules import ScalarOrSchedule, not_negative


class MuonState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    momentum: Tensor  # like the parameter


@factory
def muon(
    lr: ScalarOrSchedule = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Optimizer:
    """Muon: momentum, made orthogonal by Newton-Schulz iterations in bfloat16. For matrices only.

        m <- momentum m + (1 - momentum) g
        u <- g + momentum (m - g) with nesterov, else m;   X <- u / max(|u|, eps)
        ns_steps times: A = X X^T,  X <- a X + (b A + c A A) X
        p <- p (1 - lr weight_decay) - lr s X
        s = sqrt(max(1, rows / columns)), or for "match_rms_adamw" 0.2 sqrt(max(rows, columns))

    Give embeddings, biases, norms and the last layer another optimizer:
    `partition({("*bias", "embed.*"): adamw(3e-4), "*": muon(0.02)})`.

    Args:
        lr: Learning rate, or a schedule of it.
        weight_decay: Decoupled decay.
        momentum: Decay of the velocity.
        nesterov: Look ahead.
        ns_coefficients: (a, b, c).
        eps: The least norm to divide by.
        ns_steps: Iterations; below 100.
        adjust_lr_fn: "original", also for None, or "match_rms_adamw": the factor s.

    Returns:
        An `Optimizer`. State: `MuonState(step, momentum)`.

    Raises:
        ValueError: a negative or infinite lr, momentum or weight_decay; another adjust_lr_fn; at init: parameters that are
            no matrices.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Muon.
    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    >>> opt = muon(0.1, weight_decay=0.0)
    >>> p = torch.zeros(2, 2)
    >>> new, _ = opt.step_param(p, torch.tensor([[3.0, 0.0], [0.0, 3.0]]), opt.init_param(p))
    >>> bool((new[0, 0] < -0.05) & (new[0, 1] == 0))
    True
    """
    not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
    if not isinstance(ns_coefficients, (tuple, list)) or len(ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients must be three numbers, got {ns_coefficients!r}")
    whole_number("ns_steps", ns_steps, 0, 99)
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")

    def check(params: Tree) -> None:
        other = {path: tuple(p.shape) for path, p in named_leaves(params).items() if p.dim() != 2}
        if other:
            raise ValueError(
                f"muon takes matrices only, got {other}; give these another optimizer: partition({{...: adamw(), '*': muon()}})"
            )

    def step_param(param: Tensor, grad: Tensor, state: MuonState) -> tuple[Tensor, MuonState]:
        rate = rate_at(lr, state.step)
        velocity = torch.lerp(state.momentum, grad, 1 - momentum)
        update = torch.lerp(grad, velocity, momentum) if nesterov else velocity
        direction = _orthogonal(update, ns_coefficients, ns_steps, eps)
        rows, columns = param.shape
        if adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        else:
            factor = math.sqrt(max(1, rows / max(columns, 1)))
        param = param * (1 - rate * weight_decay).to(param.dtype)
        return param - (rate * factor).to(param.dtype) * direction.to(param.dtype), MuonState(state.step + 1, velocity)

    return from_kernel(zeros(MuonState), step_param, elementwise=False, check=check, cost=_products)


def _products(shape: torch.Size) -> float:
    """The time of the products of matrices in a Newton-Schulz iteration."""
    return float(shape[0] * shape[1] * min(shape))


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix with the singular vectors of `x` and singular values near 1, in bfloat16."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.to(torch.bfloat16)
    y = y.T if tall else y
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y
