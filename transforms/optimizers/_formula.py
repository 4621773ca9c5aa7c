"""What the pure formulas share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._schedules import ScalarOrSchedule, value_at


def rate_at(lr: ScalarOrSchedule, step: Tensor) -> Tensor:
    """The learning rate of a step, 0-d float64."""
    return torch.as_tensor(value_at(lr, step), dtype=torch.float64)


def used(value: Any) -> bool:
    """Whether a hyperparameter has an effect; of a tensor, which may be traced, nobody knows."""
    return isinstance(value, Tensor) or bool(value)


def root(x: Tensor) -> Tensor:
    """The square root, with derivative 1 at 0, where it has none: so that one can differentiate through training."""
    zero = x == 0
    return torch.where(zero, x, torch.where(zero, torch.ones_like(x), x).sqrt())
