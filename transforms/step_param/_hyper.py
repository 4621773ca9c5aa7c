"""Hyperparameters, checked when an optimizer is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._check import is_finite, is_number
from ..tree._tree import readable_without_sync


def not_negative(**values: Any) -> None:
    """Raise unless each is a finite number, at least 0, a tensor of one element, or a schedule.

    The values of tensors are checked where that does not wait for a device, schedules when they are called.

    Raises:
        ValueError: a number below 0, infinite or NaN; a tensor of several elements.
        TypeError: none of these.
    """
    _require("at least 0 and finite", lambda number: number >= 0 and is_finite(number), values)


def a_number(**values: Any) -> None:
    """Raise for a hyperparameter that is not finite, or neither number, tensor nor schedule."""
    _require("a finite number", is_finite, values)


def no_schedule(**values: Any) -> None:
    """As `a_number`, where a schedule is refused too."""
    for name, value in values.items():
        if not is_number(value) and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a number or a tensor of one element, got {value!r}")
    a_number(**values)


def within(least: float, most: float, **values: Any) -> None:
    """Raise ValueError for a hyperparameter outside a range, TypeError for one that is no number."""
    _require(f"from {least:g} to {most:g}", lambda number: least <= number <= most, values)


def _require(what: str, fine: Callable[[Any], bool], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        number = _number(name, value)
        if number is not None and not fine(number):
            raise ValueError(f"{name} must be {what}, got {value!r}")


def check_betas(betas: Any) -> tuple[Any, Any]:
    """The two decay rates: numbers, or 0-d tensors.

    Raises:
        ValueError: not two of them; outside [0, 1); a number and a tensor; a tensor of several elements.
        TypeError: one is no number.
    """
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ValueError(f"betas must be two numbers, at least 0 and below 1, got {betas!r}") from None
    if isinstance(beta1, Tensor) != isinstance(beta2, Tensor):
        raise ValueError(f"betas must be two numbers or two tensors, got {betas!r}")
    for i, beta in enumerate((beta1, beta2)):
        number = _number(f"betas[{i}]", beta)
        if callable(beta):
            raise TypeError(f"betas[{i}] must be a number or a tensor of one element, got {beta!r}")
        if number is not None and not 0.0 <= number < 1.0:
            raise ValueError(f"betas must be two numbers, at least 0 and below 1, got {betas!r}")
    return tuple(beta.reshape(()) if isinstance(beta, Tensor) else beta for beta in (beta1, beta2))  # type: ignore[return-value]


def _number(name: str, value: Any) -> float | Tensor | None:
    """The value as the host knows it; None where it does not."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        raise TypeError(
            f"{name} must be a number or a schedule, got torch's {type(value).__name__}; tabulate it with "
            f"from_torch_scheduler(make, lr, total_steps), or hand fjoin.Optimizer to it"
        )
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool:
            raise ValueError(
                f"{name} must be a number or a tensor of one real element, got one of shape {tuple(value.shape)}, {value.dtype}"
            )
        return float(value) if readable_without_sync(value) else None
    if is_number(value):
        return value  # type: ignore[no-any-return]
    if not callable(value) or isinstance(value, type):
        hint = f"; write float({value!r})" if isinstance(value, str) else ""
        raise TypeError(f"{name} must be a number, a tensor of one element or a schedule, got {value!r}{hint}")
    return None
