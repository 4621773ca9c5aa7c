"""Adagrad."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad as torch_adagrad

from ..schedules._schedules import ScalarOrSchedule
from ..spec._spec import factory
from ..step_param._formula import penalized, rate_at, root
from ..step_param._hyper import not_negative
from ..step_param._inplace import by_formula, from_kernel, kernel_lr, new_step, slots
from ..step_param._optimizer import Optimizer
from ..tree._tree import to_device


class AdagradState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    sum: Tensor  # like the parameter: the sum of all squared gradients


@factory
def adagrad(
    lr: ScalarOrSchedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> Optimizer:
    """Adagrad: steps divided by the root of the sum of all squared gradients.

        g <- g + weight_decay p
        s <- s + g^2
        p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    Args:
        lr: Learning rate, or a schedule of it.
        lr_decay: Decay of the learning rate; see above.
        weight_decay: L2 penalty.
        initial_accumulator_value: The initial value of s.
        eps: Added to the root.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdagradState(step, sum)`.

    Raises:
        ValueError: a negative or infinite argument.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adagrad.
    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 12, 2011, section 1.

    >>> opt = adagrad(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    not_negative(
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        initial_accumulator_value=initial_accumulator_value,
        eps=eps,
    )

    def init_param(param: Tensor) -> AdagradState:
        start = initial_accumulator_value
        start = to_device(param.device, start, param.dtype) if isinstance(start, Tensor) else start
        return AdagradState(new_step(param), torch.zeros_like(param) + start)

    def step_param(param: Tensor, grad: Tensor, state: AdagradState) -> tuple[Tensor, AdagradState]:
        grad = penalized(param, grad, weight_decay, maximize)
        total = state.sum + grad * grad
        rate = rate_at(lr, state.step) / (1 + state.step.double() * lr_decay)
        return param - rate.to(param.dtype) * (grad / (root(total) + eps)), AdagradState(state.step + 1, total)

    formula = by_formula(step_param)

    def kernel(params: list[Tensor], grads: list[Tensor], states: list[AdagradState]) -> None:
        if states[0].step.device.type != "cpu":  # torch's kernel reads the step, and waits for the device
            return formula(params, grads, states)
        torch_adagrad(
            params,
            grads,
            slots(states, "sum"),
            slots(states, "step"),
            foreach=True,
            lr=kernel_lr(lr, states[0].step),
            weight_decay=weight_decay,
            lr_decay=lr_decay,
            eps=eps,
            maximize=maximize,
        )

    return from_kernel(init_param, step_param, kernel, numbers=(lr_decay, weight_decay, eps))
