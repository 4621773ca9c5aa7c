"""Averaged stochastic gradient descent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.asgd import asgd as torch_asgd

from ..schedules._schedules import ScalarOrSchedule
from ..spec._spec import factory
from ..step_param._formula import first_rate, penalized, rate_at
from ..step_param._hyper import a_number, not_negative
from ..step_param._inplace import from_kernel, kernel_of, new_step, set_first_rates, slots
from ..step_param._optimizer import Optimizer


class ASGDState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    eta: Tensor  # the next step's learning rate, 0-d float32
    mu: Tensor  # the next step's share in the average, 0-d float32
    ax: Tensor  # like the parameter: the average


@factory
def asgd(
    lr: ScalarOrSchedule = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Averaged stochastic gradient descent; the average of the parameters is in its state.

        g <- g + weight_decay p
        p <- p (1 - lambd eta) - eta g,   a <- a + mu (p - a)
        eta <- lr / (1 + lambd lr t)^alpha,   mu <- 1 / max(1, t - t0)       eta starts at lr, mu at 1

    Args:
        lr: Learning rate, or a schedule of it; a step but the first uses the value of the step before.
        lambd: Decay.
        alpha: Power of the learning rate's decay.
        t0: Steps before the averaging begins.
        weight_decay: L2 penalty.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `ASGDState(step, eta, mu, ax)`.

    Raises:
        ValueError: a negative or infinite lr or weight_decay.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.ASGD.
    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM 30, 1992.

    >>> opt = asgd(0.1, lambd=0.0)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8000])
    """
    not_negative(lr=lr, weight_decay=weight_decay)
    a_number(lambd=lambd, alpha=alpha, t0=t0)

    def init_param(param: Tensor) -> ASGDState:
        step = new_step(param)
        return ASGDState(
            step, rate_at(lr, step).to(step) * torch.ones_like(step), torch.ones_like(step), torch.zeros_like(param)
        )

    def step_param(param: Tensor, grad: Tensor, state: ASGDState) -> tuple[Tensor, ASGDState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        grad = penalized(param, grad, weight_decay, maximize)
        eta = first_rate(lr, state.step, state.eta).double()
        param = param * (1 - lambd * eta).to(dtype) - eta.to(dtype) * grad
        average = torch.where(state.mu == 1, param, state.ax + (param - state.ax) * state.mu.to(dtype))
        wide = step.double()
        next_eta = (rate / torch.pow(1 + lambd * rate * wide, alpha)).to(torch.float32)
        next_mu = (1 / torch.clamp(wide - t0, min=1.0)).to(torch.float32)
        return param, ASGDState(step, next_eta, next_mu, average)

    # Not foreach, whose learning rates are rounded to float32 on the way.
    kernel = kernel_of(
        torch_asgd,
        ("ax", "mu", "eta", "step"),
        foreach=False,
        lr=lr,
        lambd=lambd,
        t0=t0,
        alpha=alpha,
        weight_decay=weight_decay,
        maximize=maximize,
    )

    def begun(params: list[Tensor], grads: list[Tensor], states: list[ASGDState]) -> None:
        set_first_rates(lr, [state.step for state in states], slots(states, "eta"))
        kernel(params, grads, states)

    return from_kernel(init_param, step_param, begun, ("step", "eta", "mu"), numbers=(lambd, alpha, t0, weight_decay))
