"""What the in-place kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._schedules import ScalarOrSchedule, value_at


def not_negative(**values: Any) -> None:
    """Raise ValueError for a hyperparameter below 0; tensors and schedules are not looked into."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not value >= 0.0:
            raise ValueError(f"{name} must be at least 0, got {value!r}")


def check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas if isinstance(beta, (int, float))):
        raise ValueError(f"betas must be two numbers, at least 0 and below 1, got {betas!r}")


def kernel_lr(lr: ScalarOrSchedule, step: Tensor) -> Any:
    """The learning rate as a fused kernel wants it: a number, or a tensor where reading it would wait for the device."""
    value = value_at(lr, step)
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" else value.to(torch.float32)
    return value


def copy_like(param: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` that lies in memory as the parameter does: kernels go through memory, not through indices."""
    value = value.detach()
    return value.clone() if value.stride() == param.stride() else torch.empty_like(param).copy_(value)


def laid_out(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients, lying in memory as the parameters do.

    Raises:
        ValueError: a parameter has gaps or overlaps in memory.
    """
    if all(p.is_contiguous() and g.is_contiguous() for p, g in zip(params, grads, strict=True)):
        return grads
    for param in params:
        if torch.empty_like(param, device="meta").stride() != param.stride():  # it keeps the strides of what is dense
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps or overlaps in memory, which an "
                f"in-place step cannot serve; give it param.contiguous()"
            )
    return [g if g.stride() == p.stride() else copy_like(p, g) for p, g in zip(params, grads, strict=True)]


def unscale(grads: list[Tensor], grad_scale: Tensor | None) -> Tensor | None:
    """The scale to hand to a fused kernel; float64 is divided here, since kernels take a float32 scale."""
    if grad_scale is None:
        return None
    if grads[0].dtype is torch.float64:
        torch._foreach_div_(grads, grad_scale)
        return None
    return grad_scale.to(torch.float32)


def one_param(step_params_: Callable[..., None]) -> Callable[..., None]:
    """`step_param_` from `step_params_`."""

    def step_param_(param: Tensor, grad: Tensor, state: Any, **guards: Tensor | None) -> None:
        step_params_([param], [grad], [state], **guards)

    return step_param_


def new_step(param: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=param.device)
