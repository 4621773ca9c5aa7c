"""RAdam."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.radam import radam as torch_radam

from ...schedules._schedules import ScalarOrSchedule
from ...spec._spec import factory
from ...step_param._formula import lerp, penalized, rate_at, root
from ...step_param._hyper import check_betas, not_negative
from ...step_param._inplace import from_kernel, kernel_of, new_step
from ...step_param._optimizer import Optimizer


class RAdamState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_avg_sq: Tensor  # like the parameter


@factory
def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam that divides by the second moment only once enough gradients have been seen.

        g <- g + weight_decay p                          (decoupled: p <- p (1 - lr weight_decay))
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        R = 2 / (1 - b2) - 1,     r = R - 2 t b2^t / (1 - b2^t)
        p <- p - lr m / (1 - b1^t) s
        s = sqrt((r - 4) (r - 2) R / ((R - 4) (R - 2) r)) sqrt(1 - b2^t) / (sqrt(v) + eps)  where r > 5, else 1

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: L2 penalty, or decoupled decay.
        decoupled_weight_decay: Decay parameters themselves, as `adamw`.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `RAdamState(step, exp_avg, exp_avg_sq)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.RAdam.
    Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, arXiv:1908.03265, algorithm 2.

    >>> opt = radam(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8000])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)
    longest = 2 / (1 - beta2) - 1

    def init_param(param: Tensor) -> RAdamState:
        return RAdamState(new_step(param), torch.zeros_like(param), torch.zeros_like(param))

    def step_param(param: Tensor, grad: Tensor, state: RAdamState) -> tuple[Tensor, RAdamState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        grad = penalized(param, grad, 0.0 if decoupled_weight_decay else weight_decay, maximize)
        if decoupled_weight_decay:
            param = param * (1 - rate * weight_decay).to(dtype)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        wide = step.double()
        correction2 = 1 - torch.pow(beta2, wide)
        length = longest - 2 * wide * torch.pow(beta2, wide) / correction2
        factor = torch.ones_like(exp_avg_sq)
        if longest > 5:
            enough = length > 5
            known = torch.where(enough, length, 6.0)  # neither branch then has a NaN as its derivative
            rectified = ((known - 4) * (known - 2) * longest / ((longest - 4) * (longest - 2) * known)).sqrt()
            scale = (rectified * correction2.sqrt()).to(dtype) / (root(exp_avg_sq) + eps)
            factor = torch.where(enough, scale, factor)
        param = param - (rate / (1 - torch.pow(beta1, wide))).to(dtype) * exp_avg * factor
        return param, RAdamState(step, exp_avg, exp_avg_sq)

    kernel = kernel_of(
        torch_radam,
        ("exp_avg", "exp_avg_sq", "step"),
        foreach=None,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
    )
    return from_kernel(init_param, step_param, kernel, numbers=(beta1, beta2, eps, weight_decay))
