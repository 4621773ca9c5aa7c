"""Schedules: hyperparameters as functions of the step.

A schedule takes the number of steps taken before this one (0 in the first step; a number or a 0-d
tensor) and returns a 0-d float64 tensor. Any callable of this form is a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._check import finite, whole_number
from ..spec._spec import Spec, factory, spec_of_function
from ..spec._specified import PickledBySpec
from ._rates import ScalarOrSchedule as ScalarOrSchedule
from ._rates import value_at as value_at


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(PickledBySpec):
    """A function of the step that carries a spec.

    Attributes:
        function: `step -> value`, of a 0-d float64 tensor.
        spec: The schedule as data.
        finite: Whether every value is known to be a finite 0-d tensor.
    """

    function: Callable[[Tensor], Tensor]
    spec: Spec = Spec("")
    finite: bool = False

    def __call__(self, step: Any) -> Tensor:
        return self.function(torch.as_tensor(step, dtype=torch.float64))

    def with_spec(self, spec: Spec) -> Schedule:
        return replace(self, spec=spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def _spec(self) -> Spec:
        return self.spec if self.spec.name else spec_of_function(self.function)

    def __repr__(self) -> str:
        return repr(self._spec)


def steps_at_least(name: str, value: int, least: int) -> None:
    whole_number(name, value, least)


@factory
def linear(start: float, end: float, total_steps: int) -> Schedule:
    """From `start` in step 0 in a straight line to `end` in step `total_steps`, then constant.

        start + (end - start) min(s / total_steps, 1)

    Args:
        start, end: Values.
        total_steps: Steps; at least 1.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError, TypeError: `total_steps` is below 1; a value that is no finite number.

    Same as: torch.optim.lr_scheduler.LinearLR; optax.linear_schedule.

    >>> [linear(0.0, 1.0, 4)(s).item() for s in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    finite(start=start, end=end)
    steps_at_least("total_steps", total_steps, 1)
    return Schedule(lambda step: start + (end - start) * torch.clamp(step / total_steps, max=1.0), finite=True)


@factory
def cosine(start: float, total_steps: int, end: float = 0.0) -> Schedule:
    """From `start` in step 0 along half a cosine to `end` in step `total_steps`, then constant.

        end + (start - end) (1 + cos(pi min(s / total_steps, 1))) / 2

    Args:
        start, end: Values.
        total_steps: Steps; at least 1.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError, TypeError: `total_steps` is below 1; a value that is no finite number.

    Same as: torch.optim.lr_scheduler.CosineAnnealingLR, up to T_max; optax.cosine_decay_schedule.

    >>> [round(cosine(1.0, 4)(s).item(), 4) for s in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """
    finite(start=start, end=end)
    steps_at_least("total_steps", total_steps, 1)

    def function(step: Tensor) -> Tensor:
        done = torch.clamp(step / total_steps, max=1.0)
        return end + (start - end) * 0.5 * (1 + torch.cos(math.pi * done))

    return Schedule(function, finite=True)


@factory
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Linear warm-up to `peak`, then half a cosine down to `end`.

    Step s has peak (s + 1) / warmup_steps while s < warmup_steps, so the first step is not 0. Step `warmup_steps - 1`
    is the first one at `peak`; step `total_steps` has `end`.

    Args:
        peak, end: Values.
        warmup_steps: Steps; 0 for none.
        total_steps: Steps, warm-up included; above `warmup_steps`.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError, TypeError: `warmup_steps` is negative, or `total_steps` not above it; a value that is no finite
            number.

    Same as: LinearLR and CosineAnnealingLR in torch's SequentialLR.

    >>> [round(warmup_cosine(1.0, 2, 6)(s).item(), 4) for s in (0, 1, 2, 4, 6)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    finite(peak=peak, end=end)
    steps_at_least("warmup_steps", warmup_steps, 0)
    steps_at_least("total_steps", total_steps, warmup_steps + 1)
    rest = cosine(peak, total_steps - warmup_steps, end)

    def function(step: Tensor) -> Tensor:
        rise = peak * (step + 1) / max(warmup_steps, 1)
        return torch.where(step < warmup_steps, rise, rest(torch.clamp(step - warmup_steps, min=0.0)))

    return Schedule(function, finite=True)
