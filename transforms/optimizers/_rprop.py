"""Resilient backpropagation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.rprop import rprop as torch_rprop

from .._check import is_number
from ..schedules._schedules import ScalarOrSchedule
from ..spec._spec import factory
from ..step_param._formula import first_rate, rate_at
from ..step_param._hyper import not_negative
from ..step_param._inplace import from_kernel, kernel_of, new_step, set_first_rates, slots
from ..step_param._optimizer import Optimizer


class RpropState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    prev: Tensor  # like the parameter: the previous gradient
    step_size: Tensor  # like the parameter


@factory
def rprop(
    lr: ScalarOrSchedule = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    maximize: bool = False,
) -> Optimizer:
    """Resilient backpropagation: each element has its own step size, and the gradient gives only the sign.

        a <- clip(a e, step_sizes),   e = eta+ where g g' > 0,  eta- where g g' < 0,  else 1
        g <- 0 where g g' < 0
        p <- p - sign(g) a,   g' <- g

    Args:
        lr: The first step size a, or a schedule; only its value in the first step is used.
        etas: (eta-, eta+), below and above 1.
        step_sizes: The smallest and the largest step size.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `RpropState(step, prev, step_size)`.

    Raises:
        ValueError: a negative or infinite lr; etas that are not 0 < eta- < 1 < eta+.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Rprop.
    Source: Riedmiller and Braun, A direct adaptive method for faster backpropagation learning, 1993, section IV.

    >>> opt = rprop(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    not_negative(lr=lr)
    if not _pair(etas) or not 0.0 < etas[0] < 1.0 < etas[1]:
        raise ValueError(f"etas must be two numbers, one above 0 and below 1, one above 1, got {etas!r}")
    if not _pair(step_sizes):
        raise ValueError(f"step_sizes must be two numbers, the smallest and the largest, got {step_sizes!r}")
    down, up = etas
    least, most = step_sizes

    def init_param(param: Tensor) -> RpropState:
        step = new_step(param)
        size = rate_at(lr, step).to(param) * torch.ones_like(param)
        return RpropState(step, torch.zeros_like(param), size)

    def step_param(param: Tensor, grad: Tensor, state: RpropState) -> tuple[Tensor, RpropState]:
        if maximize:
            grad = -grad
        agrees = grad * state.prev
        size = first_rate(lr, state.step, state.step_size)
        size = torch.where(agrees > 0, size * up, torch.where(agrees < 0, size * down, size)).clamp(least, most)
        grad = torch.where(agrees < 0, torch.zeros_like(grad), grad)
        return param - grad.sign() * size, RpropState(state.step + 1, grad, size)

    kernel = kernel_of(
        torch_rprop,
        ("prev", "step_size", "step"),
        foreach=True,
        step_size_min=least,
        step_size_max=most,
        etaminus=down,
        etaplus=up,
        maximize=maximize,
    )

    def begun(params: list[Tensor], grads: list[Tensor], states: list[RpropState]) -> None:
        set_first_rates(lr, [state.step for state in states], slots(states, "step_size"))
        kernel(params, grads, states)

    return from_kernel(init_param, step_param, begun)


def _pair(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and len(values) == 2 and all(map(is_number, values))
