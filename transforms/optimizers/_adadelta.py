"""Adadelta."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta as torch_adadelta

from ..schedules._schedules import ScalarOrSchedule
from ..spec._spec import factory
from ..step_param._formula import penalized, rate_at
from ..step_param._hyper import not_negative, within
from ..step_param._inplace import from_kernel, kernel_of, new_step
from ..step_param._optimizer import Optimizer


class AdadeltaState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    square_avg: Tensor  # like the parameter
    acc_delta: Tensor  # like the parameter


@factory
def adadelta(
    lr: ScalarOrSchedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Adadelta: gradients in the units of earlier steps.

        g <- g + weight_decay p
        v <- rho v + (1 - rho) g^2
        d <- sqrt(u + eps) / sqrt(v + eps) g
        u <- rho u + (1 - rho) d^2
        p <- p - lr d

    Args:
        lr: Factor of each step, or a schedule of it.
        rho: Decay of the averages, from 0 to 1.
        eps: Added under the roots.
        weight_decay: L2 penalty.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdadeltaState(step, square_avg, acc_delta)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; rho outside [0, 1].
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adadelta.
    Source: Zeiler, ADADELTA: An Adaptive Learning Rate Method, arXiv:1212.5701, algorithm 1.

    >>> opt = adadelta(eps=1.0)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([3.0]), opt.init_param(p))[0]
    tensor([-1.1764])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    within(0.0, 1.0, rho=rho)

    def init_param(param: Tensor) -> AdadeltaState:
        return AdadeltaState(new_step(param), torch.zeros_like(param), torch.zeros_like(param))

    def step_param(param: Tensor, grad: Tensor, state: AdadeltaState) -> tuple[Tensor, AdadeltaState]:
        grad = penalized(param, grad, weight_decay, maximize)
        square_avg = rho * state.square_avg + (1 - rho) * grad * grad
        delta = (state.acc_delta + eps).sqrt() / (square_avg + eps).sqrt() * grad
        acc_delta = rho * state.acc_delta + (1 - rho) * delta * delta
        rate = rate_at(lr, state.step).to(param.dtype)
        return param - rate * delta, AdadeltaState(state.step + 1, square_avg, acc_delta)

    kernel = kernel_of(
        torch_adadelta,
        ("square_avg", "acc_delta", "step"),
        foreach=True,
        lr=lr,
        rho=rho,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
    )
    return from_kernel(init_param, step_param, kernel, numbers=(rho, eps, weight_decay))
