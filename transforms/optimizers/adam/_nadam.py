"""NAdam."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.nadam import nadam as torch_nadam

from ...schedules._schedules import ScalarOrSchedule
from ...spec._spec import factory
from ...step_param._formula import lerp, penalized, rate_at, root
from ...step_param._hyper import check_betas, not_negative
from ...step_param._inplace import from_kernel, kernel_of, new_step
from ...step_param._optimizer import Optimizer


class NAdamState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    mu_product: Tensor  # the product of the momenta so far, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_avg_sq: Tensor  # like the parameter


@factory
def nadam(
    lr: ScalarOrSchedule = 2e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam with Nesterov momentum.

        g <- g + weight_decay p                          (decoupled: p <- p (1 - lr weight_decay))
        mu_t = b1 (1 - 0.96^(t momentum_decay) / 2),     M <- M mu_t
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        p <- p - lr ((1 - mu_t) / (1 - M) g + mu_{t+1} / (1 - M mu_{t+1}) m) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: L2 penalty, or decoupled decay.
        momentum_decay: How fast the momentum approaches b1.
        decoupled_weight_decay: Decay parameters themselves, as `adamw`.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `NAdamState(step, mu_product, exp_avg, exp_avg_sq)`.

    Raises:
        ValueError: a negative or infinite lr, eps, weight_decay or momentum_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.NAdam.
    Source: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop, algorithm 2.

    >>> opt = nadam(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8944])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    beta1, beta2 = check_betas(betas)

    def init_param(param: Tensor) -> NAdamState:
        step = new_step(param)
        return NAdamState(step, torch.ones_like(step), torch.zeros_like(param), torch.zeros_like(param))

    def step_param(param: Tensor, grad: Tensor, state: NAdamState) -> tuple[Tensor, NAdamState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        grad = penalized(param, grad, 0.0 if decoupled_weight_decay else weight_decay, maximize)
        if decoupled_weight_decay:
            param = param * (1 - rate * weight_decay).to(dtype)
        wide = step.double()
        mu, mu_next = (beta1 * (1 - 0.5 * torch.pow(0.96, t * momentum_decay)) for t in (wide, wide + 1))
        product = state.mu_product * mu.to(torch.float32)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        below = root(exp_avg_sq / (1 - torch.pow(beta2, wide)).to(dtype)) + eps
        of_grad = rate * (1 - mu) / (1 - product.double())
        of_avg = rate * mu_next / (1 - product.double() * mu_next)
        param = param - of_grad.to(dtype) * (grad / below) - of_avg.to(dtype) * (exp_avg / below)
        return param, NAdamState(step, product, exp_avg, exp_avg_sq)

    kernel = kernel_of(
        torch_nadam,
        ("exp_avg", "exp_avg_sq", "mu_product", "step"),
        foreach=True,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        momentum_decay=momentum_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
    )
    return from_kernel(
        init_param,
        step_param,
        kernel,
        ("step", "mu_product"),
        numbers=(beta1, beta2, eps, weight_decay, momentum_decay),
    )
