"""Adagrad, Adadelta, RMSprop and Adafactor."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta as torch_adadelta
from torch.optim.adagrad import adagrad as torch_adagrad
from torch.optim.rmsprop import rmsprop as torch_rmsprop

from ..base import factory, trees
from ._kernels import from_kernel, from_torch, in_float32_, in_place, kernel_lr, new_step, slots, zeros
from ._optimizer import Optimizer, Tensors, decayed, in_float32, lerp, penalized, rate_at, root, used, wide_root
from ._schedules import ScalarOrSchedule, not_negative, within


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
    numbers = dict(lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    not_negative(lr=lr, initial_accumulator_value=initial_accumulator_value, **numbers)

    def init_param(param: Tensor) -> AdagradState:
        start = initial_accumulator_value
        start = trees.to_device(param.device, start, param.dtype) if isinstance(start, Tensor) else start
        return AdagradState(new_step(param), torch.zeros_like(param) + start)

    def step_param(param: Tensor, grad: Tensor, state: AdagradState) -> tuple[Tensor, AdagradState]:
        grad = penalized(param, grad, weight_decay)
        total = state.sum + grad * grad
        rate = rate_at(lr, state.step) / (1 + state.step.double() * lr_decay)
        return param - rate.to(param.dtype) * (grad / (root(total) + eps)), AdagradState(state.step + 1, total)

    def kernel(params: Tensors, grads: Tensors, states: list[AdagradState]) -> None:
        settings: Any = dict(lr=kernel_lr(lr, states[0].step), **numbers, maximize=maximize)
        sums, steps = slots(states, "sum", "step")
        torch_adagrad(params, grads, sums, steps, foreach=True, **settings)

    step_params_ = in_float32_(in_place(kernel))  # torch's kernel reads the step, and waits for a device
    return from_kernel(init_param, step_param, step_params_, numbers.values(), maximize=maximize, on_devices=False)


class AdadeltaState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    square_avg: Tensor  # like the parameter
    acc_delta: Tensor  # like the parameter


@factory
def adadelta(
    lr: ScalarOrSchedule = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, maximize: bool = False
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

    def step_param(param: Tensor, grad: Tensor, state: AdadeltaState) -> tuple[Tensor, AdadeltaState]:
        grad = penalized(param, grad, weight_decay)
        square_avg = rho * state.square_avg + (1 - rho) * grad * grad
        delta = (state.acc_delta + eps).sqrt() / (square_avg + eps).sqrt() * grad
        acc_delta = rho * state.acc_delta + (1 - rho) * delta * delta
        rate = rate_at(lr, state.step).to(param.dtype)
        return param - rate * delta, AdadeltaState(state.step + 1, square_avg, acc_delta)

    settings = dict(rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize)
    return from_torch(zeros(AdadeltaState), step_param, torch_adadelta, lr, settings)


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

    def step_param(param: Tensor, grad: Tensor, state: RMSpropState) -> tuple[Tensor, RMSpropState]:
        rate = rate_at(lr, state.step).to(param.dtype)
        grad = penalized(param, grad, weight_decay)
        square_avg = alpha * state.square_avg + (1 - alpha) * grad * grad
        second, grad_avg, velocity = square_avg, state.grad_avg, state.momentum
        if grad_avg is not None:
            grad_avg = lerp(grad_avg, grad, 1 - alpha)
            second = square_avg - grad_avg * grad_avg
        direction = grad / (root(second) + eps)
        if velocity is not None and used(momentum):
            direction = velocity = momentum * velocity + direction
        return param - rate * direction, RMSpropState(state.step + 1, square_avg, velocity, grad_avg)

    settings = dict(
        alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered, maximize=maximize
    )
    names = "square_avg", "grad_avg", "momentum", "step"
    init_param = zeros(RMSpropState, momentum=used(momentum), grad_avg=centered)
    return from_torch(init_param, step_param, torch_rmsprop, lr, settings, names=names)


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
    within(-math.inf, 0.0, beta2_decay=beta2_decay)
    within(1.0, math.inf, d=d)

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
        wide = step.double()
        share = torch.pow(wide, beta2_decay).to(dtype)
        size = torch.minimum(rate, wide.rsqrt()).to(dtype) * _rms(param).clamp(min=eps2)
        param = decayed(param, rate, weight_decay)
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

    return from_kernel(init_param, step_param, elementwise=False, maximize=maximize, widens=True)


def _rms(x: Tensor) -> Tensor:
    return wide_root(x, torch.mean).to(x.dtype)
