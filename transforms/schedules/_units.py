"""Schedules written in epochs, and as factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._check import finite
from ..spec._spec import factory
from ._schedules import Schedule, steps_at_least


@factory
def by_epoch(schedule: Callable[[Any], Any], steps_per_epoch: int) -> Schedule:
    """A schedule whose argument counts epochs: its value changes at the first step of each.

        value(s) = schedule(floor(s / steps_per_epoch))

    Args:
        schedule: A schedule, of the number of epochs before this one.
        steps_per_epoch: Steps, at least 1. With `step.join` an epoch has as many steps as the longest of all ranks' loaders has
            batches, divided by `accumulate` and rounded up.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError: `steps_per_epoch` is below 1.
        TypeError: `schedule` is no schedule.

    Same as: a torch scheduler whose `step()` is called once per epoch.

    >>> from fjoin import transforms as tx
    >>> rate = by_epoch(tx.piecewise(0.1, {1: 0.5}), steps_per_epoch=3)
    >>> [rate(s).item() for s in (0, 2, 3, 8)]
    [0.1, 0.1, 0.05, 0.05]
    """
    steps_at_least("steps_per_epoch", steps_per_epoch, 1)
    if not callable(schedule):
        raise TypeError(f"by_epoch: schedule must be a schedule, got {schedule!r}; a fixed rate needs no by_epoch")

    def function(step: Tensor) -> Tensor:
        return torch.as_tensor(schedule(torch.floor(step / steps_per_epoch)), dtype=torch.float64)

    return Schedule(function, finite=getattr(schedule, "finite", False))


@factory
def by_factor(base: float, factor: Callable[[Any], Any]) -> Schedule:
    """A rate times a factor that is a function of the step, which is how torch's LambdaLR writes a schedule.

        value(s) = base factor(s)

    Args:
        base: The rate.
        factor: `step -> factor`, of the steps taken before, a 0-d float64 tensor; it returns a number or a 0-d tensor.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64.

    Raises:
        ValueError: `base` is no finite number.
        TypeError: `factor` is not callable.

    Same as: torch.optim.lr_scheduler.LambdaLR.

    >>> [round(by_factor(0.1, lambda step: 0.5**step)(s).item(), 4) for s in (0, 1, 2)]
    [0.1, 0.05, 0.025]
    """
    finite(base=base)
    if not callable(factor):
        raise TypeError(f"by_factor: factor must be a function of the step, got {factor!r}")
    return Schedule(lambda step: base * torch.as_tensor(factor(step), dtype=torch.float64))
