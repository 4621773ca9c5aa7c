"""Adafactor."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..schedules._schedules import ScalarOrSchedule
from ..spec._spec import factory
from ..step_param._formula import in_float32, rate_at, wide_root
from ..step_param._hyper import a_number, not_negative
from ..step_param._inplace import by_formula, in_place, new_step, one_param
from ..step_param._optimizer import Optimizer


class AdafactorState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    row_var: Tensor | None  # the parameter's shape, but 1 in the last dim; None for vectors
    col_var: Tensor | None  # the parameter's shape, but 1 in the last dim but one; None for vectors
    variance: Tensor | None  # like the parameter; None for matrices


@factory
def adafactor(
    lr: ScalarOrSchedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Adafactor: the second moment is stored as one number for each row and each column of a matrix.

        w = t^beta2_decay,   a = max(eps2, rms(p)) min(lr, 1 / sqrt(t))
        R <- R + w (row means of g^2 - R),   C <- C + w (column means of g^2 - C)
        V = R C / max(mean(R), eps1)               (vectors: V <- V + w (g^2 - V))
        u = g / max(sqrt(V), eps1)
        p <- p (1 - lr weight_decay) - a u / max(1, rms(u) / d)

    Args:
        lr: Largest relative step, and factor of the decay, or a schedule of it.
        beta2_decay: Power by which the averages slow down; at most 0.
        eps: (eps1, eps2): least root of the second moment, None for the dtype's own epsilon, and least size of a
            parameter.
        d: Largest root mean square of a step, before it is made relative; at least 1.
        weight_decay: Decoupled decay.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdafactorState(step, row_var, col_var, variance)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; beta2_decay above 0; d below 1.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adafactor.
    Source: Shazeer and Stern, Adafactor, arXiv:1804.04235, algorithms 4 and 5.

    >>> opt = adafactor(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise ValueError(f"eps must be (eps1, eps2), of which eps1 may be None, got {eps!r}")
    eps1, eps2 = eps
    not_negative(lr=lr, weight_decay=weight_decay, eps1=0.0 if eps1 is None else eps1, eps2=eps2)
    a_number(beta2_decay=beta2_decay, d=d)
    if isinstance(beta2_decay, (int, float)) and not beta2_decay <= 0:
        raise ValueError(f"beta2_decay must be at most 0, got {beta2_decay!r}")
    if isinstance(d, (int, float)) and not d >= 1:
        raise ValueError(f"d must be at least 1, got {d!r}")

    def init_param(param: Tensor) -> AdafactorState:
        if param.dim() < 2:
            return AdafactorState(new_step(param), None, None, torch.zeros_like(param))
        rows = param.new_zeros((*param.shape[:-1], 1))
        columns = param.new_zeros((*param.shape[:-2], 1, param.shape[-1]))
        return AdafactorState(new_step(param), rows, columns, None)

    def step_param(param: Tensor, grad: Tensor, state: AdafactorState) -> tuple[Tensor, AdafactorState]:
        least = torch.finfo(param.dtype).eps if eps1 is None else eps1
        return in_float32(functools.partial(formula, least))(param, grad, state)

    def formula(least: float, param: Tensor, grad: Tensor, state: AdafactorState) -> tuple[Tensor, AdafactorState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        if maximize:
            grad = -grad
        wide = step.double()
        share = torch.pow(wide, beta2_decay).to(dtype)
        size = torch.minimum(rate, wide.rsqrt()).to(dtype) * _rms(param).clamp(min=eps2)
        param = param * (1 - rate * weight_decay).to(dtype)
        square, rows, columns, variance = grad * grad, state.row_var, state.col_var, state.variance
        if rows is not None and columns is not None:
            rows = rows + share * (square.mean(-1, keepdim=True) - rows)
            columns = columns + share * (square.mean(-2, keepdim=True) - columns)
            second = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=least)
        else:
            assert variance is not None
            second = variance = variance + share * (square - variance)
        update = grad * second.clamp(min=least * least).rsqrt()
        update = update / (_rms(update) / d).clamp(min=1.0)
        return param - size * update, AdafactorState(step, rows, columns, variance)

    step_params_ = in_place(by_formula(step_param))
    return Optimizer(init_param, step_param, one_param(step_params_), step_params_, elementwise=False)


def _rms(x: Tensor) -> Tensor:
    return wide_root(x, torch.mean).to(x.dtype)
