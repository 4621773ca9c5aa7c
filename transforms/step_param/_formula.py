"""Common functions of the pure formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._sums import widened
from ..schedules._schedules import ScalarOrSchedule, value_at
from ..tree._tree import fields, with_fields


def rate_at(lr: ScalarOrSchedule, step: Tensor) -> Tensor:
    """The learning rate of a step, 0-d float64."""
    if step.is_meta:  # where only the form of a state is computed
        return torch.zeros((), dtype=torch.float64)
    return torch.as_tensor(value_at(lr, step), dtype=torch.float64)


def first_rate(lr: ScalarOrSchedule, step: Tensor, kept: Tensor) -> Tensor:
    """What a state keeps of the learning rate, or before the first step the rate itself, which may have changed since."""
    return torch.where(step == 0, rate_at(lr, step).to(kept.dtype), kept)


def used(value: Any) -> bool:
    """Whether a hyperparameter may have an effect; True for tensors, since they may be traced."""
    return isinstance(value, Tensor) or bool(value)


def penalized(param: Tensor, grad: Tensor, weight_decay: Any, maximize: bool) -> Tensor:
    """The gradient of the objective to minimize, with an L2 penalty."""
    if maximize:
        grad = -grad
    return grad + weight_decay * param if used(weight_decay) else grad


def root(x: Tensor) -> Tensor:
    """The square root with derivative 1 at 0, where it has none, to allow differentiation through training."""
    zero = x == 0
    return torch.where(zero, x, torch.where(zero, torch.ones_like(x), x).sqrt())


def lerp(start: Tensor, end: Tensor, share: Any) -> Tensor:
    """start + share (end - start), without cancellation if one of them is much smaller than the other."""
    return torch.lerp(start, end, share.to(start.dtype) if isinstance(share, Tensor) else share)


def wide_root(x: Tensor, reduced: Callable[[Tensor], Tensor]) -> Tensor:
    """The root of the sum, or the mean, of squares, taken in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return root(reduced(wide * wide))


def like(param: Tensor, state: Any, new: Tensor, fields_of: Any) -> tuple[Tensor, Any]:
    """The result of a step in the dtypes before it; type promotion with 0-d hyperparameters changes 0-d tensors."""
    pairs = zip(fields(state), fields(fields_of), strict=True)
    return new.to(param.dtype), with_fields(fields_of, [b if a is None else b.to(a.dtype) for a, b in pairs])


def in_float32(step_param: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """A formula that computes with 16-bit parameters in float32 and rounds parameter and state once.

    In 16 bits an eps of 1e-8 and the square of a small gradient are 0, and their quotients NaN.
    """

    def wide(param: Tensor, grad: Tensor, state: Any) -> tuple[Tensor, Any]:
        if param.dtype.itemsize >= 4:
            return step_param(param, grad, state)
        new, after = step_param(param.float(), grad.float(), widened_state(state))
        return like(param, state, new, after)

    return wide


def widened_state(state: Any) -> Any:
    """A state with its 16-bit fields in float32."""
    return with_fields(state, [None if field is None else widened(field) for field in fields(state)])


def copy_like(param: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` with the parameter's memory layout: kernels iterate over memory, not over indices."""
    value = value.detach()
    like = value.shape == param.shape and value.stride() != param.stride()
    return torch.empty_like(param, dtype=value.dtype).copy_(value) if like else value.clone()
