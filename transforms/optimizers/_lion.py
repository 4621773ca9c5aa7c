"""Lion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base import factory
from ._kernels import from_kernel, in_float32_, in_place, kernel_lr, slots, zeros
from ._optimizer import Optimizer, lerp, rate_at
from ._schedules import ScalarOrSchedule, check_betas, not_negative


class LionState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter


@factory
def lion(
    lr: ScalarOrSchedule = 1e-4,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Lion: the sign of an interpolation between momentum and gradient.

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p)
        m <- b2 m + (1 - b2) g

    Args:
        lr: Learning rate, or a schedule of it; three to ten times smaller than for `adamw`.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        weight_decay: Decoupled decay; three to ten times larger than for `adamw`.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `LionState(step, exp_avg)`.

    Raises:
        ValueError: a negative or infinite lr or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: optax.lion.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.

    >>> opt = lion(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    not_negative(lr=lr, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)

    def step_param(param: Tensor, grad: Tensor, state: LionState) -> tuple[Tensor, LionState]:
        rate = rate_at(lr, state.step)
        if maximize:
            grad = -grad
        direction = lerp(state.exp_avg, grad, 1 - beta1).sign()
        param = param * (1 - rate * weight_decay).to(param.dtype) - rate.to(param.dtype) * direction
        return param, LionState(state.step + 1, lerp(state.exp_avg, grad, 1 - beta2))

    def kernel(params: list[Tensor], grads: list[Tensor], states: list[LionState]) -> None:
        rate, averages = kernel_lr(lr, states[0].step), slots(states, "exp_avg")
        if maximize:
            grads = list(torch._foreach_neg(grads))
        directions = torch._foreach_lerp(averages, grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, rate)
        if weight_decay:
            torch._foreach_mul_(params, 1 - rate * weight_decay)
        torch._foreach_sub_(params, directions)
        torch._foreach_lerp_(averages, grads, 1 - beta2)
        for state in states:
            state.step.add_(1)

    return from_kernel(zeros(LionState), step_param, in_float32_(in_place(kernel)), (beta1, beta2, weight_decay))
