"""What the pure formulas share."""

from __future__ import annotations

import torch
from torch import Tensor

from ._schedules import ScalarOrSchedule, value_at


def rate_at(lr: ScalarOrSchedule, step: Tensor) -> Tensor:
    """The learning rate of a step, 0-d float64."""
    return torch.as_tensor(value_at(lr, step), dtype=torch.float64)


def root(x: Tensor) -> Tensor:
    """The square root, with derivative 1 at 0, where it has none: so that one can differentiate through training."""
    zero = x == 0
    return torch.where(zero, x, torch.where(zero, torch.ones_like(x), x).sqrt())
