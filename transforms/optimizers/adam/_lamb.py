"""LAMB."""

from __future__ import annotations

import torch
from torch import Tensor

from ...schedules._schedules import ScalarOrSchedule
from ...spec._spec import factory
from ...step_param._formula import lerp, rate_at, root, wide_root
from ...step_param._hyper import check_betas, not_negative
from ...step_param._inplace import from_kernel, new_step
from ...step_param._optimizer import Optimizer
from ._adam import AdamState


@factory
def lamb(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """LAMB: Adam's step, scaled to the norm of each parameter; for large batches.

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        u <- m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p
        p <- p - lr |p| / |u| u                                   (where |p| or |u| is 0: p - lr u)

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: Decay, as part of the step.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdamState(step, exp_avg, exp_avg_sq, None)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: optax.lamb.
    Source: You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2.

    >>> opt = lamb(0.1)
    >>> p = torch.tensor([3.0, 4.0])
    >>> opt.step_param(p, torch.tensor([2.0, 0.0]), opt.init_param(p))[0]
    tensor([2.5000, 4.0000])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)

    def init_param(param: Tensor) -> AdamState:
        return AdamState(new_step(param), torch.zeros_like(param), torch.zeros_like(param), None)

    def step_param(param: Tensor, grad: Tensor, state: AdamState) -> tuple[Tensor, AdamState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        if maximize:
            grad = -grad
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        wide = step.double()
        correction1, correction2 = 1 - torch.pow(beta1, wide), (1 - torch.pow(beta2, wide)).sqrt()
        update = exp_avg / correction1.to(dtype) / (root(exp_avg_sq) / correction2.to(dtype) + eps)
        update = update + weight_decay * param
        length, step_length = wide_root(param, torch.sum), wide_root(update, torch.sum)
        both = (length > 0) & (step_length > 0)
        ratio = torch.where(
            both, length / torch.where(both, step_length, torch.ones_like(length)), torch.ones_like(length)
        )
        return param - rate.to(dtype) * ratio.to(dtype) * update, AdamState(step, exp_avg, exp_avg_sq, None)

    return from_kernel(init_param, step_param, elementwise=False)
