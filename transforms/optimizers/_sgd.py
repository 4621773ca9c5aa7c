"""Stochastic gradient descent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..schedules._schedules import ScalarOrSchedule, value_at
from ..spec._spec import factory
from ..step_param._formula import in_float32, penalized, used
from ..step_param._hyper import a_number, not_negative
from ..step_param._inplace import (
    by_formula,
    from_kernel,
    in_float32_,
    in_place,
    kernel_lr,
    new_step,
    slots,
    through_memory,
    unscale,
)
from ..step_param._optimizer import Optimizer


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
        dampening: The share of each new gradient that is not added to the velocity.
        weight_decay: L2 penalty.
        nesterov: Look ahead; needs momentum and no dampening.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `SGDState(step, momentum)`.

    Raises:
        ValueError: a negative or infinite lr, momentum or weight_decay; nesterov without momentum or with dampening.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.SGD.
    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, 2013, section 2.

    >>> opt = sgd(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8000])
    """
    not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    a_number(dampening=dampening)
    known = isinstance(momentum, (int, float)) and isinstance(dampening, (int, float))
    if nesterov and known and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov needs momentum above 0 and dampening 0, got momentum={momentum!r}, dampening={dampening!r}"
        )

    def init_param(param: Tensor) -> SGDState:
        return SGDState(new_step(param), torch.zeros_like(param) if used(momentum) else None)

    def step_param(param: Tensor, grad: Tensor, state: SGDState) -> tuple[Tensor, SGDState]:
        rate = value_at(lr, state.step)
        rate = rate.to(param.dtype) if isinstance(rate, Tensor) else rate
        grad = penalized(param, grad, weight_decay, maximize)
        velocity = state.momentum
        if velocity is not None and used(momentum):
            velocity = momentum * velocity + (1 - dampening) * grad
            if used(dampening):
                velocity = torch.where(state.step == 0, grad, velocity)
            grad = grad + momentum * velocity if nesterov else velocity
        return param - rate * grad, SGDState(state.step + 1, velocity)

    formula = in_place(by_formula(in_float32(step_param)))

    def step_params_(
        params: list[Tensor],
        grads: list[Tensor],
        states: list[SGDState],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        step = states[0].step
        # The kernel is told by the host whether this is the first step.
        if momentum and dampening and step.device.type != "cpu":
            return formula(params, grads, states, grad_scale=grad_scale, found_inf=found_inf)
        # The velocity starts at 0, so only dampening makes the first step different.
        first = bool(momentum) and bool(dampening) and bool(step == 0)
        rate = kernel_lr(lr, step)

        def run(params: list[Tensor], grads: list[Tensor], velocities: list[Tensor]) -> None:
            torch._fused_sgd_(
                params,
                grads,
                velocities,
                weight_decay=weight_decay,
                momentum=momentum,
                lr=rate,
                dampening=dampening,
                nesterov=nesterov,
                maximize=maximize,
                is_first_step=first,
                grad_scale=unscale(grads, grad_scale),
                found_inf=found_inf,
            )

        through_memory(run, params, grads, slots(states, "momentum") if momentum else [])
        step.add_(1 if found_inf is None else 1 - found_inf)

    wide = in_float32_(step_params_)

    def on_halves(params: list[Tensor], grads: list[Tensor], states: list[SGDState], **guards: Tensor | None) -> None:
        """On CPUs the fused kernel silently leaves most bfloat16 and float16 values unchanged."""
        step = wide if params and params[0].device.type == "cpu" else step_params_
        step(params, grads, states, **guards)

    return from_kernel(init_param, step_param, numbers=(momentum, dampening, weight_decay), fused=on_halves)
