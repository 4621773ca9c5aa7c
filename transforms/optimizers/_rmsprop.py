"""RMSprop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.rmsprop import rmsprop as torch_rmsprop

from ..schedules._schedules import ScalarOrSchedule
from ..spec._spec import factory
from ..step_param._formula import lerp, penalized, rate_at, root, used
from ..step_param._hyper import not_negative
from ..step_param._inplace import from_kernel, kernel_of, new_step
from ..step_param._optimizer import Optimizer


class RMSpropState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    square_avg: Tensor  # like the parameter
    momentum: Tensor | None  # like the parameter; None without momentum
    grad_avg: Tensor | None  # like the parameter; None unless centered


@factory
def rmsprop(
    lr: ScalarOrSchedule = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """RMSprop: steps divided by a moving root mean square of the gradient.

        g <- g + weight_decay p
        v <- alpha v + (1 - alpha) g^2
        r <- sqrt(v) + eps                (centered: a <- alpha a + (1 - alpha) g,  r <- sqrt(v - a^2) + eps)
        p <- p - lr g / r                 (momentum: m <- momentum m + g / r,  p <- p - lr m)

    Args:
        lr: Learning rate, or a schedule of it.
        alpha: Decay of the averages.
        eps: Added to the root.
        weight_decay: L2 penalty.
        momentum: Factor of the velocity; 0 keeps none.
        centered: Use the variance in place of the mean square. As in torch, rounding can make it negative, and
            its root a NaN, where gradients hardly change.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `RMSpropState(step, square_avg, momentum, grad_avg)`.

    Raises:
        ValueError: a negative or infinite argument.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.RMSprop.
    Source: Hinton, Neural Networks for Machine Learning, lecture 6e; centered: Graves, arXiv:1308.0850, section 4.2.

    >>> opt = rmsprop(0.1, alpha=0.75)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8000])
    """
    not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)

    def init_param(param: Tensor) -> RMSpropState:
        return RMSpropState(
            new_step(param),
            torch.zeros_like(param),
            torch.zeros_like(param) if used(momentum) else None,
            torch.zeros_like(param) if centered else None,
        )

    def step_param(param: Tensor, grad: Tensor, state: RMSpropState) -> tuple[Tensor, RMSpropState]:
        rate = rate_at(lr, state.step).to(param.dtype)
        grad = penalized(param, grad, weight_decay, maximize)
        square_avg = alpha * state.square_avg + (1 - alpha) * grad * grad
        second, grad_avg, velocity = square_avg, state.grad_avg, state.momentum
        if grad_avg is not None:
            grad_avg = lerp(grad_avg, grad, 1 - alpha)
            second = square_avg - grad_avg * grad_avg
        direction = grad / (root(second) + eps)
        if velocity is not None and used(momentum):
            direction = velocity = momentum * velocity + direction
        return param - rate * direction, RMSpropState(state.step + 1, square_avg, velocity, grad_avg)

    kernel = kernel_of(
        torch_rmsprop,
        ("square_avg", "grad_avg", "momentum", "step"),
        foreach=True,
        lr=lr,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        momentum=momentum,
        centered=centered,
        maximize=maximize,
    )
    return from_kernel(init_param, step_param, kernel, numbers=(alpha, eps, weight_decay, momentum))
