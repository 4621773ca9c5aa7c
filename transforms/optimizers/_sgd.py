"""Stochastic gradient descent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._base import Optimizer
from .._spec import factory
from ._inplace import kernel_lr, new_step, not_negative, unscale
from ._schedules import ScalarOrSchedule, value_at


class SGDState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    momentum: Tensor | None  # like the parameter; None without momentum


@factory
def sgd(
    lr: ScalarOrSchedule = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, with momentum.

        g <- g + weight_decay p
        m <- momentum m + (1 - dampening) g        (in the first step m <- g)
        p <- p - lr m                              (nesterov: p - lr (g + momentum m))

    Args:
        lr: Learning rate, or a schedule of it.
        momentum: Factor of the velocity; 0 keeps none.
        dampening: What is taken off each new gradient in the velocity.
        weight_decay: L2 penalty.
        nesterov: Look ahead; needs momentum and no dampening.
        maximize: Go up instead of down.

    Returns:
        An `Optimizer`. State: `SGDState(step, momentum)`.

    Raises:
        ValueError: a negative lr, momentum or weight_decay; nesterov without momentum or with dampening.

    Same as: torch.optim.SGD.
    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, 2013, section 2.

    >>> opt = sgd(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8000])
    """
    not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov needs momentum above 0 and dampening 0, got momentum={momentum!r}, dampening={dampening!r}")

    def init_param(param: Tensor) -> SGDState:
        return SGDState(new_step(param), torch.zeros_like(param) if momentum else None)

    def step_param(param: Tensor, grad: Tensor, state: SGDState) -> tuple[Tensor, SGDState]:
        rate = value_at(lr, state.step)
        rate = rate.to(param.dtype) if isinstance(rate, Tensor) else rate
        if maximize:
            grad = -grad
        if weight_decay:
            grad = grad + weight_decay * param
        velocity = state.momentum
        if velocity is not None:
            velocity = momentum * velocity + (1 - dampening) * grad
            if dampening:
                velocity = torch.where(state.step == 0, grad, velocity)
            grad = grad + momentum * velocity if nesterov else velocity
        return param - rate * grad, SGDState(state.step + 1, velocity)

    def step_param_(
        param: Tensor, grad: Tensor, state: SGDState, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        scale = unscale(grad, grad_scale)
        # The velocity starts at 0, so that only dampening tells the first step from the others.
        first = bool(dampening) and state.momentum is not None and bool(state.step == 0)
        torch._fused_sgd_(
            [param], [grad], [] if state.momentum is None else [state.momentum], weight_decay=weight_decay,
            momentum=momentum, lr=kernel_lr(lr, state.step), dampening=dampening, nesterov=nesterov,
            maximize=maximize, is_first_step=first, grad_scale=scale, found_inf=found_inf,
        )  # fmt: skip
        state.step.add_(1 if found_inf is None else 1 - found_inf)

    return Optimizer(init_param, step_param, step_param_)
