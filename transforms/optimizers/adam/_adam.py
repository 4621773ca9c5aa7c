"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...schedules._schedules import ScalarOrSchedule
from ...spec._spec import factory
from ...step_param._formula import lerp, penalized, rate_at, root
from ...step_param._hyper import check_betas, not_negative
from ...step_param._inplace import from_kernel, kernel_lr, new_step, slots, through_memory, unscale
from ...step_param._optimizer import Optimizer


class AdamState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_avg_sq: Tensor  # like the parameter
    max_exp_avg_sq: Tensor | None  # like the parameter; None without amsgrad


@factory
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam; weight decay is an L2 penalty on the gradient.

        g <- g + weight_decay p
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        p <- p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)     amsgrad: the largest v so far

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: L2 penalty.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdamState(step, exp_avg, exp_avg_sq, max_exp_avg_sq)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1), or a number and a tensor.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adam.
    Source: Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1; amsgrad: arXiv:1904.09237.

    >>> opt = adam(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=False)


@factory
def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay: p <- p (1 - lr weight_decay) before the step of `adam`.

    Args, Returns, Raises: as `adam`.

    Same as: torch.optim.AdamW.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.

    >>> opt = adamw(0.1, weight_decay=0.5)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8500])
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=True)


def _adam(
    lr: ScalarOrSchedule,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
) -> Optimizer:
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def init_param(param: Tensor) -> AdamState:
        return AdamState(
            new_step(param),
            torch.zeros_like(param),
            torch.zeros_like(param),
            torch.zeros_like(param) if amsgrad else None,
        )

    def step_param(param: Tensor, grad: Tensor, state: AdamState) -> tuple[Tensor, AdamState]:
        dtype = param.dtype
        rate = rate_at(lr, state.step)
        step = state.step + 1
        grad = penalized(param, grad, 0.0 if decoupled else weight_decay, maximize)
        if decoupled:
            param = param * (1 - rate * weight_decay).to(dtype)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        largest = None if state.max_exp_avg_sq is None else torch.maximum(state.max_exp_avg_sq, exp_avg_sq)
        second = exp_avg_sq if largest is None else largest
        # The corrections in float64: 1 - 0.999^t loses half of float32's digits at small t.
        wide = step.to(torch.float64)
        correction1 = 1 - torch.pow(beta1, wide)
        correction2 = (1 - torch.pow(beta2, wide)).sqrt().to(dtype)
        param = param - (rate / correction1).to(dtype) * (exp_avg / (root(second) / correction2 + eps))
        return param, AdamState(step, exp_avg, exp_avg_sq, largest)

    def step_params_(
        params: list[Tensor],
        grads: list[Tensor],
        states: list[AdamState],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        step = states[0].step
        rate = kernel_lr(lr, step)
        step.add_(1)

        def run(params: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> None:
            kernel(
                params,
                grads,
                *moments,
                [step] * len(params),
                lr=rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=amsgrad,
                maximize=maximize,
                grad_scale=unscale(grads, grad_scale),
                found_inf=found_inf,
            )

        through_memory(
            run, params, grads, slots(states, "exp_avg"), slots(states, "exp_avg_sq"), slots(states, "max_exp_avg_sq")
        )
        if found_inf is not None:
            step.sub_(found_inf)

    return from_kernel(init_param, step_param, numbers=(beta1, beta2, eps, weight_decay), fused=step_params_)
