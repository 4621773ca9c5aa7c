"""The values of schedules, checked before they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._check import is_finite, is_number
from ..spec._spec import Spec, _show
from ..tree._tree import readable_without_sync

ScalarOrSchedule: TypeAlias = float | Tensor | Callable[[Any], Any]


def value_at(hyper: ScalarOrSchedule, step: Tensor) -> float | Tensor:
    """The hyperparameter for a step, a number or a 0-d tensor; `step` counts the steps taken before.

    Raises:
        ValueError: a schedule returned several elements, or a value that is not finite, where looking waits for
            nothing.
        TypeError: a schedule returned neither a number nor a tensor.
    """
    if not callable(hyper):
        return hyper.reshape(()) if isinstance(hyper, Tensor) and hyper.dim() else hyper
    try:
        value: Any = hyper(step)
    except TypeError as error:
        raise TypeError(
            f"the schedule {_show(hyper)} does not take the number of the step, a 0-d tensor: {error}. A schedule of numbers, such as "
            f"optax's, is lambda step: float(schedule(int(step)))"
        ) from error
    if getattr(hyper, "finite", False):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or (value.is_meta and not step.is_meta):
            raise ValueError(
                f"the schedule {_show(hyper)} returned a tensor with layout {value.layout} on {value.device} in step "
                f"{_shown(step)}, expected a dense one with a value"
            )
        if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool:
            raise ValueError(
                f"the schedule {_show(hyper)} returned a tensor of shape {tuple(value.shape)}, {value.dtype}, in step "
                f"{_shown(step)}, expected one real number"
            )
        if readable_without_sync(value):
            _check_finite(hyper, float(value), step)
        return value.reshape(())
    if not is_number(value):
        raise TypeError(f"the schedule {_show(hyper)} returned {value!r} in step {_shown(step)}, expected a number")
    _check_finite(hyper, value, step)
    return value  # type: ignore[no-any-return]


def _check_finite(hyper: Any, value: Any, step: Any) -> None:
    if not is_finite(value):
        raise ValueError(
            f"the schedule {_show(hyper)} returned {value!r} in step {_shown(step)}, expected a finite number"
        )


def _shown(step: Any) -> Any:
    return int(step) if not isinstance(step, Tensor) or readable_without_sync(step) else "that is on a device"


def watched(spec: Spec, injected: bool = False) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters of an optimizer that may become non-finite while training: (name, schedule or tensor).

    Those of an optimizer inside it are included.

    Args:
        injected: Whether an `inject_hyperparameters` around it reads the schedules.

    Raises:
        TypeError: another hyperparameter than lr follows a schedule, and none does.
    """
    found: list[tuple[str, Any]] = []
    for name, value in spec.args:
        if hasattr(value, "step_param"):
            found += watched(value.spec, injected or spec.name == "inject_hyperparameters")
        elif callable(value) and name != "lr" and not injected and spec.is_ours:
            raise TypeError(
                f"{spec.name}: {name} follows the schedule {_show(value)}; only lr can do so by itself, so wrap the optimizer in "
                f"inject_hyperparameters(...)"
            )
        elif isinstance(value, Tensor) or (callable(value) and not getattr(value, "finite", False)):
            found.append((name, value))
    return tuple(found)


def check_rates(hypers: tuple[tuple[str, Any], ...], step: Tensor) -> list[tuple[str, float]]:
    """The hyperparameters of `watched` in this step, by name; without those for which it would wait for a device.

    Raises:
        ValueError, TypeError: as `value_at`; a tensor that holds no finite number.
    """
    found = []
    for name, hyper in hypers:
        value = value_at(hyper, step)
        if isinstance(value, Tensor) and not readable_without_sync(value):
            continue
        number = float(value)
        if value is hyper and not is_finite(number):
            raise ValueError(f"{name} must be a finite number, got {hyper!r}")
        found.append((name, number))
    return found
