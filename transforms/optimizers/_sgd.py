"""SGD, averaged SGD, Rprop, Lion and Muon."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.asgd import asgd as torch_asgd
from torch.optim.rprop import rprop as torch_rprop

from ..base import Tree, checks, factory, trees
from ._kernels import from_kernel, from_torch, in_float32_, in_place, kernel_lr, new_step, run_fused, slots, zeros
from ._optimizer import Optimizer, Tensors, decayed, first_rate, lerp, penalized, rate_at, used
from ._schedules import ScalarOrSchedule, a_number, check_betas, not_negative, value_at


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
        raise ValueError(f"nesterov needs momentum above 0 and dampening 0, got {momentum=} and {dampening=}")

    def step_param(param: Tensor, grad: Tensor, state: SGDState) -> tuple[Tensor, SGDState]:
        rate = value_at(lr, state.step)
        rate = rate.to(param.dtype) if isinstance(rate, Tensor) else rate
        grad = penalized(param, grad, weight_decay)
        velocity = state.momentum
        if velocity is not None and used(momentum):
            velocity = momentum * velocity + (1 - dampening) * grad
            if used(dampening):
                velocity = torch.where(state.step == 0, grad, velocity)
            grad = grad + momentum * velocity if nesterov else velocity
        return param - rate * grad, SGDState(state.step + 1, velocity)

    settings: dict[str, Any] = dict(momentum=momentum, dampening=dampening, weight_decay=weight_decay)
    settings.update(nesterov=nesterov, maximize=maximize)

    def step_params_(params: Tensors, grads: Tensors, states: list[Any], **guards: Tensor | None) -> None:
        step = states[0].step
        if momentum and states[0].momentum is None:  # a group got one
            raise ValueError(f"momentum is {momentum}, but was 0 when the state was made: begin with a small momentum")
        # The velocity starts at 0, so only dampening makes the first step different.
        first = bool(momentum) and bool(dampening) and bool(step == 0)
        velocities = slots(states, "momentum")[0] if momentum else []
        now = {**settings, "lr": kernel_lr(lr, step), "is_first_step": first}
        run_fused(torch._fused_sgd_, [params, grads, velocities], guards, now)
        found_inf = guards.get("found_inf")
        step.add_(1 if found_inf is None else 1 - found_inf)

    # On CPUs the fused kernel silently leaves most bfloat16 and float16 values unchanged.
    kernel = in_float32_(step_params_, on_devices=False)
    # The host tells the kernel whether this is the first step.
    on_devices = not (used(momentum) and used(dampening))
    init_param = zeros(SGDState, momentum=used(momentum))
    return from_kernel(init_param, step_param, kernel, settings.values(), maximize=maximize, on_devices=on_devices)


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
        grad = penalized(param, grad, weight_decay)
        eta = first_rate(lr, state.step, state.eta).double()
        param = param * (1 - lambd * eta).to(dtype) - eta.to(dtype) * grad
        average = torch.where(state.mu == 1, param, state.ax + (param - state.ax) * state.mu.to(dtype))
        wide = step.double()
        next_eta = (rate / torch.pow(1 + lambd * rate * wide, alpha)).to(torch.float32)
        next_mu = (1 / torch.clamp(wide - t0, min=1.0)).to(torch.float32)
        return param, ASGDState(step, next_eta, next_mu, average)

    settings = dict(lambd=lambd, t0=t0, alpha=alpha, weight_decay=weight_decay, maximize=maximize)
    names, common = ("ax", "mu", "eta", "step"), ("step", "eta", "mu")
    # Not foreach, whose learning rates are rounded to float32 on the way.
    return from_torch(
        init_param, step_param, torch_asgd, lr, settings, names=names, common=common, first=(lr, "eta"), foreach=False
    )


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
        agrees = grad * state.prev
        size = first_rate(lr, state.step, state.step_size)
        size = torch.where(agrees > 0, size * up, torch.where(agrees < 0, size * down, size)).clamp(least, most)
        grad = torch.where(agrees < 0, torch.zeros_like(grad), grad)
        return param - grad.sign() * size, RpropState(state.step + 1, grad, size)

    settings = dict(step_size_min=least, step_size_max=most, etaminus=down, etaplus=up, maximize=maximize)
    return from_torch(init_param, step_param, torch_rprop, None, settings, first=(lr, "step_size"))


class LionState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    exp_avg: Tensor  # like the parameter


@factory
def lion(
    lr: ScalarOrSchedule = 1e-4,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Lion: the sign of an interpolation between momentum and gradient.

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p)
        m <- b2 m + (1 - b2) g

    Args:
        lr: Learning rate, or a schedule of it; three to ten times smaller than for `adamw`.
        betas: (b1, b2), at least 0 and below 1: two numbers, or two tensors of one element.
        weight_decay: Decoupled decay; three to ten times larger than for `adamw`.
        maximize: Maximize the objective instead of minimizing it.

    Returns:
        An `Optimizer`. State: `LionState(step, exp_avg)`.

    Raises:
        ValueError: a negative or infinite lr or weight_decay; betas outside [0, 1).
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: optax.lion.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.

    >>> opt = lion(0.1)
    >>> p = torch.tensor([1.0])
    >>> opt.step_param(p, torch.tensor([2.0]), opt.init_param(p))[0]
    tensor([0.9000])
    """
    not_negative(lr=lr, weight_decay=weight_decay)
    beta1, beta2 = check_betas(betas)

    def step_param(param: Tensor, grad: Tensor, state: LionState) -> tuple[Tensor, LionState]:
        rate = rate_at(lr, state.step)
        direction = lerp(state.exp_avg, grad, 1 - beta1).sign()
        param = decayed(param, rate, weight_decay) - rate.to(param.dtype) * direction
        return param, LionState(state.step + 1, lerp(state.exp_avg, grad, 1 - beta2))

    def kernel(params: Tensors, grads: Tensors, states: list[LionState]) -> None:
        rate, (averages,) = kernel_lr(lr, states[0].step), slots(states, "exp_avg")
        if maximize:
            grads = list(torch._foreach_neg(grads))
        directions = torch._foreach_lerp(averages, grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, rate)
        if weight_decay:
            torch._foreach_mul_(params, 1 - rate * weight_decay)
        torch._foreach_sub_(params, directions)
        torch._foreach_lerp_(averages, grads, 1 - beta2)
        for state in states:
            state.step.add_(1)

    numbers = (beta1, beta2, weight_decay)
    return from_kernel(zeros(LionState), step_param, in_float32_(in_place(kernel)), numbers, maximize=maximize)


class MuonState(NamedTuple):
    step: Tensor  # steps taken, 0-d float32
    momentum: Tensor  # like the parameter


@factory
def muon(
    lr: ScalarOrSchedule = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Optimizer:
    """Muon: momentum, made orthogonal by Newton-Schulz iterations in bfloat16. For matrices only.

        m <- momentum m + (1 - momentum) g
        u <- g + momentum (m - g) with nesterov, else m;   X <- u / max(|u|, eps)
        ns_steps times: A = X X^T,  X <- a X + (b A + c A A) X
        p <- p (1 - lr weight_decay) - lr s X
        s = sqrt(max(1, rows / columns)), or for "match_rms_adamw" 0.2 sqrt(max(rows, columns))

    Give embeddings, biases, norms and the last layer another optimizer:
    `partition({("*bias", "embed.*"): adamw(3e-4), "*": muon(0.02)})`.

    Args:
        lr: Learning rate, or a schedule of it.
        weight_decay: Decoupled decay.
        momentum: Decay of the velocity.
        nesterov: Look ahead.
        ns_coefficients: (a, b, c).
        eps: The least norm to divide by.
        ns_steps: Iterations; below 100.
        adjust_lr_fn: "original", also for None, or "match_rms_adamw": the factor s.

    Returns:
        An `Optimizer`. State: `MuonState(step, momentum)`.

    Raises:
        ValueError: a negative or infinite lr, momentum or weight_decay; another adjust_lr_fn; at init: parameters that
            are no matrices.
        TypeError: an argument that is neither a number nor a tensor; lr may be a schedule too.

    Same as: torch.optim.Muon.
    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    >>> opt = muon(0.1, weight_decay=0.0)
    >>> p = torch.zeros(2, 2)
    >>> new, _ = opt.step_param(p, torch.tensor([[3.0, 0.0], [0.0, 3.0]]), opt.init_param(p))
    >>> bool((new[0, 0] < -0.05) & (new[0, 1] == 0))
    True
    """
    not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
    if not isinstance(ns_coefficients, (tuple, list)) or len(ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients must be three numbers, got {ns_coefficients!r}")
    checks.whole_number("ns_steps", ns_steps, 0, 99)
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")

    def check(params: Tree) -> None:
        other = {path: tuple(p.shape) for path, p in trees.named_leaves(params).items() if p.dim() != 2}
        if other:
            raise ValueError(
                f"muon takes matrices only, got {other}; give these another optimizer: partition({{...: adamw(), '*': muon()}})"
            )

    def step_param(param: Tensor, grad: Tensor, state: MuonState) -> tuple[Tensor, MuonState]:
        rate = rate_at(lr, state.step)
        velocity = torch.lerp(state.momentum, grad, 1 - momentum)
        update = torch.lerp(grad, velocity, momentum) if nesterov else velocity
        direction = _orthogonal(update, ns_coefficients, ns_steps, eps)
        rows, columns = param.shape
        if adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        else:
            factor = math.sqrt(max(1, rows / max(columns, 1)))
        param = decayed(param, rate, weight_decay)
        return param - (rate * factor).to(param.dtype) * direction.to(param.dtype), MuonState(state.step + 1, velocity)

    return from_kernel(zeros(MuonState), step_param, elementwise=False, check=check, cost=_products)


def _products(shape: torch.Size) -> float:
    """The time of the products of matrices in a Newton-Schulz iteration."""
    return float(shape[0] * shape[1] * min(shape))


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix with the singular vectors of `x` and singular values near 1, in bfloat16."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.to(torch.bfloat16)
    y = y.T if tall else y
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


def _pair(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and len(values) == 2 and all(map(checks.is_number, values))
