"""AdaMax."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamax import adamax as torch_adamax

from ...schedules._schedules import ScalarOrSchedule
from ...spec._spec import factory
from ...step_param._formula import lerp, penalized, rate_at
from ...step_param._hyper import check_betas, not_negative
from ...step_param._inplace import from_kernel, kernel_of, new_step
from ...step_param._optimizer import Optimizer


class AdamaxState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_inf: Tensor  # like the parameter


@factory
def adamax(
    lr: ScalarOrSchedule = 2e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """AdaMax: Adam with a decaying maximum in place of the second moment.

        g <- g + weight_decay p
        m <- b1 m + (1 - b1) g,   u <- max(b2 u, |g| + eps)
        p <- p - lr / (1 - b1^t) m / u

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the size of the gradient.
        weight_decay: L2 penalty.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdamaxState(step, exp_avg, exp_inf)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adamax.
    Source: Kingma and Ba, Adam, arXiv:1412.6980, algorithm 2.

    >>> opt = adamax(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)

    def init_param(param: Tensor) -> AdamaxState:
        return AdamaxState(new_step(param), torch.zeros_like(param), torch.zeros_like(param))

    def step_param(param: Tensor, grad: Tensor, state: AdamaxState) -> tuple[Tensor, AdamaxState]:
        rate, step = rate_at(lr, state.step), state.step + 1
        grad = penalized(param, grad, weight_decay, maximize)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_inf = torch.maximum(beta2 * state.exp_inf, grad.abs() + eps)
        rate = rate / (1 - torch.pow(beta1, step.double()))
        return param - rate.to(param.dtype) * (exp_avg / exp_inf), AdamaxState(step, exp_avg, exp_inf)

    kernel = kernel_of(
        torch_adamax,
        ("exp_avg", "exp_inf", "step"),
        foreach=True,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
    )
    return from_kernel(init_param, step_param, kernel, numbers=(beta1, beta2, eps, weight_decay))
