"""Adam and its relatives."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamax import adamax as torch_adamax
from torch.optim.nadam import nadam as torch_nadam
from torch.optim.radam import radam as torch_radam

from ..base import factory
from ._kernels import from_kernel, from_torch, kernel_lr, new_step, run_fused, slots, zeros
from ._optimizer import Optimizer, Tensors, lerp, penalized, rate_at, regularized, root, wide_root
from ._schedules import ScalarOrSchedule, check_betas, not_negative

Betas: TypeAlias = tuple[float | Tensor, float | Tensor]


class AdamState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_avg_sq: Tensor  # like the parameter
    max_exp_avg_sq: Tensor | None  # like the parameter; None without amsgrad


@factory
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam; weight decay is an L2 penalty on the gradient.

        g <- g + weight_decay p
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        p <- p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)     amsgrad: the largest v so far

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: L2 penalty.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdamState(step, exp_avg, exp_avg_sq, max_exp_avg_sq)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1), or a number and a tensor.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adam.
    Source: Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1; amsgrad: arXiv:1904.09237.

    >>> opt = adam(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=False)


@factory
def adamw(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay: p <- p (1 - lr weight_decay) before the step of `adam`.

    Args, Returns, Raises: as `adam`.

    Same as: torch.optim.AdamW.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.

    >>> opt = adamw(0.1, weight_decay=0.5)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8500])
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=True)


def _adam(
    lr: ScalarOrSchedule, betas: Betas, eps: float, weight_decay: float, amsgrad: bool, maximize: bool, decoupled: bool
) -> Optimizer:
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    settings = dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize)

    def step_param(param: Tensor, grad: Tensor, state: AdamState) -> tuple[Tensor, AdamState]:
        dtype = param.dtype
        rate = rate_at(lr, state.step)
        step = state.step + 1
        param, grad = regularized(param, grad, rate, weight_decay, decoupled)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        largest = None if state.max_exp_avg_sq is None else torch.maximum(state.max_exp_avg_sq, exp_avg_sq)
        second = exp_avg_sq if largest is None else largest
        # The corrections in float64: 1 - 0.999^t loses half of float32's digits at small t.
        wide = step.to(torch.float64)
        correction1 = 1 - torch.pow(beta1, wide)
        correction2 = (1 - torch.pow(beta2, wide)).sqrt().to(dtype)
        param = param - (rate / correction1).to(dtype) * (exp_avg / (root(second) / correction2 + eps))
        return param, AdamState(step, exp_avg, exp_avg_sq, largest)

    def step_params_(params: Tensors, grads: Tensors, states: list[AdamState], **guards: Tensor | None) -> None:
        step = states[0].step
        rate = kernel_lr(lr, step)
        step.add_(1)
        moments = slots(states, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        now = {**settings, "lr": rate, "state_steps": [step] * len(params)}
        run_fused(kernel, [params, grads, *moments], guards, now)
        if (found_inf := guards.get("found_inf")) is not None:
            step.sub_(found_inf)

    init_param = zeros(AdamState, max_exp_avg_sq=amsgrad)
    return from_kernel(init_param, step_param, step_params_, settings.values(), maximize=maximize)


class NAdamState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    mu_product: Tensor  # the product of the momenta so far, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_avg_sq: Tensor  # like the parameter


@factory
def nadam(
    lr: ScalarOrSchedule = 2e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam with Nesterov momentum.

        g <- g + weight_decay p                          (decoupled: p <- p (1 - lr weight_decay))
        mu_t = b1 (1 - 0.96^(t momentum_decay) / 2),     M <- M mu_t
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        p <- p - lr ((1 - mu_t) / (1 - M) g + mu_{t+1} / (1 - M mu_{t+1}) m) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: L2 penalty, or decoupled decay.
        momentum_decay: How fast the momentum approaches b1.
        decoupled_weight_decay: Decay parameters themselves, as `adamw`.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `NAdamState(step, mu_product, exp_avg, exp_avg_sq)`.

    Raises:
        ValueError: a negative or infinite lr, eps, weight_decay or momentum_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.NAdam.
    Source: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop, algorithm 2.

    >>> opt = nadam(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8944])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    beta1, beta2 = check_betas(betas)

    def init_param(param: Tensor) -> NAdamState:
        step = new_step(param)
        return NAdamState(step, torch.ones_like(step), torch.zeros_like(param), torch.zeros_like(param))

    def step_param(param: Tensor, grad: Tensor, state: NAdamState) -> tuple[Tensor, NAdamState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        param, grad = regularized(param, grad, rate, weight_decay, decoupled_weight_decay)
        wide = step.double()
        mu, mu_next = (beta1 * (1 - 0.5 * torch.pow(0.96, t * momentum_decay)) for t in (wide, wide + 1))
        product = state.mu_product * mu.to(torch.float32)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        below = root(exp_avg_sq / (1 - torch.pow(beta2, wide)).to(dtype)) + eps
        of_grad = rate * (1 - mu) / (1 - product.double())
        of_avg = rate * mu_next / (1 - product.double() * mu_next)
        param = param - of_grad.to(dtype) * (grad / below) - of_avg.to(dtype) * (exp_avg / below)
        return param, NAdamState(step, product, exp_avg, exp_avg_sq)

    settings = dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    settings.update(decoupled_weight_decay=decoupled_weight_decay, maximize=maximize)
    names = "exp_avg", "exp_avg_sq", "mu_product", "step"
    return from_torch(init_param, step_param, torch_nadam, lr, settings, names=names, common=("step", "mu_product"))


class RAdamState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_avg_sq: Tensor  # like the parameter


@factory
def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam that divides by the second moment only once enough gradients have been seen.

        g <- g + weight_decay p                          (decoupled: p <- p (1 - lr weight_decay))
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        R = 2 / (1 - b2) - 1,     r = R - 2 t b2^t / (1 - b2^t)
        p <- p - lr m / (1 - b1^t) s
        s = sqrt((r - 4) (r - 2) R / ((R - 4) (R - 2) r)) sqrt(1 - b2^t) / (sqrt(v) + eps)  where r > 5, else 1

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: L2 penalty, or decoupled decay.
        decoupled_weight_decay: Decay parameters themselves, as `adamw`.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `RAdamState(step, exp_avg, exp_avg_sq)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.RAdam.
    Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, arXiv:1908.03265, algorithm 2.

    >>> opt = radam(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.8000])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)
    longest = 2 / (1 - beta2) - 1

    def step_param(param: Tensor, grad: Tensor, state: RAdamState) -> tuple[Tensor, RAdamState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        param, grad = regularized(param, grad, rate, weight_decay, decoupled_weight_decay)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        wide = step.double()
        correction2 = 1 - torch.pow(beta2, wide)
        length = longest - 2 * wide * torch.pow(beta2, wide) / correction2
        factor = torch.ones_like(exp_avg_sq)
        if longest > 5:
            enough = length > 5
            known = torch.where(enough, length, 6.0)  # neither branch then has a NaN as its derivative
            rectified = ((known - 4) * (known - 2) * longest / ((longest - 4) * (longest - 2) * known)).sqrt()
            scale = (rectified * correction2.sqrt()).to(dtype) / (root(exp_avg_sq) + eps)
            factor = torch.where(enough, scale, factor)
        param = param - (rate / (1 - torch.pow(beta1, wide))).to(dtype) * exp_avg * factor
        return param, RAdamState(step, exp_avg, exp_avg_sq)

    settings = dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, maximize=maximize)
    settings.update(decoupled_weight_decay=decoupled_weight_decay)
    return from_torch(zeros(RAdamState), step_param, torch_radam, lr, settings, foreach=None)


class AdamaxState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter
    exp_inf: Tensor  # like the parameter


@factory
def adamax(
    lr: ScalarOrSchedule = 2e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """AdaMax: Adam with a decaying maximum in place of the second moment.

        g <- g + weight_decay p
        m <- b1 m + (1 - b1) g,   u <- max(b2 u, |g| + eps)
        p <- p - lr / (1 - b1^t) m / u

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the size of the gradient.
        weight_decay: L2 penalty.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdamaxState(step, exp_avg, exp_inf)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Adamax.
    Source: Kingma and Ba, Adam, arXiv:1412.6980, algorithm 2.

    >>> opt = adamax(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)

    def step_param(param: Tensor, grad: Tensor, state: AdamaxState) -> tuple[Tensor, AdamaxState]:
        rate, step = rate_at(lr, state.step), state.step + 1
        grad = penalized(param, grad, weight_decay)
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_inf = torch.maximum(beta2 * state.exp_inf, grad.abs() + eps)
        rate = rate / (1 - torch.pow(beta1, step.double()))
        return param - rate.to(param.dtype) * (exp_avg / exp_inf), AdamaxState(step, exp_avg, exp_inf)

    settings = dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, maximize=maximize)
    return from_torch(zeros(AdamaxState), step_param, torch_adamax, lr, settings)


@factory
def lamb(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """LAMB: Adam's step, scaled to the norm of each parameter; for large batches.

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        u <- m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p
        p <- p - lr |p| / |u| u                                   (where |p| or |u| is 0: p - lr u)

    Args:
        lr: Learning rate, or a schedule of it.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        eps: Added to the root.
        weight_decay: Decay, as part of the step.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `AdamState(step, exp_avg, exp_avg_sq, None)`.

    Raises:
        ValueError: a negative or infinite lr, eps or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: optax.lamb.
    Source: You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2.

    >>> opt = lamb(0.1)
    >>> p = torch.tensor([3.0, 4.0])
    >>> opt.step_param(p, torch.tensor([2.0, 0.0]), opt.init_param(p))[0]
    tensor([2.5000, 4.0000])
    """
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)

    def step_param(param: Tensor, grad: Tensor, state: AdamState) -> tuple[Tensor, AdamState]:
        dtype, rate, step = param.dtype, rate_at(lr, state.step), state.step + 1
        exp_avg = lerp(state.exp_avg, grad, 1 - beta1)
        exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * grad * grad
        wide = step.double()
        correction1, correction2 = 1 - torch.pow(beta1, wide), (1 - torch.pow(beta2, wide)).sqrt()
        update = exp_avg / correction1.to(dtype) / (root(exp_avg_sq) / correction2.to(dtype) + eps)
        update = update + weight_decay * param
        length, step_length = wide_root(param, torch.sum), wide_root(update, torch.sum)
        both = (length > 0) & (step_length > 0)
        ratio = torch.where(
            both, length / torch.where(both, step_length, torch.ones_like(length)), torch.ones_like(length)
        )
        return param - rate.to(dtype) * ratio.to(dtype) * update, AdamState(step, exp_avg, exp_avg_sq, None)

    return from_kernel(zeros(AdamState, max_exp_avg_sq=False), step_param, elementwise=False, maximize=maximize)
