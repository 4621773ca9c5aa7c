"""Optimizers and learning-rate schedulers in a Join, which step on ranks without input too."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


def check_steps_alone(stepper: Any) -> None:
    """Raise TypeError for an object that cannot step on a rank without input, since its step needs arguments."""
    _, *arguments = inspect.signature(type(stepper).step).parameters.values()
    needs = [p.name for p in arguments if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if needs:
        raise TypeError(
            f"a {type(stepper).__name__} cannot be in a Join: its step needs {', '.join(needs)}, which a rank that is out of input "
            f"does not have"
        )


def is_stepper(value: Any) -> bool:
    """Whether `value` is an optimizer or a learning-rate scheduler, which step on all ranks alike."""
    return isinstance(value, (torch.optim.Optimizer, LRScheduler))
