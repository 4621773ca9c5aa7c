"""A warm-up before a schedule, and the schedules of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .._check import finite
from ..spec._spec import factory
from ..tree._tree import to_device
from ._schedules import Schedule, steps_at_least


@factory
def warmup(warmup_steps: int, then: Callable[[Any], Any]) -> Schedule:
    """A linear warm-up to the first value of another schedule, then that schedule.

    Step s has then(0) (s + 1) / warmup_steps while s < warmup_steps, so the first step is not 0, and then(s -
    warmup_steps) afterwards.

    Args:
        warmup_steps: Steps; 0 for none.
        then: A schedule.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError: `warmup_steps` is negative.
        TypeError: `then` is no schedule.

    Same as: LinearLR and another one in torch's SequentialLR.

    >>> from fjoin import transforms as tx
    >>> [warmup(2, tx.linear(1.0, 0.0, 4))(s).item() for s in (0, 1, 2, 4, 6)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    steps_at_least("warmup_steps", warmup_steps, 0)
    if not callable(then):
        raise TypeError(f"warmup: then must be a schedule, got {then!r}; for a fixed rate pass lambda step: {then!r}")

    def function(step: Tensor) -> Tensor:
        rise = then(torch.zeros_like(step)) * (step + 1) / max(warmup_steps, 1)
        return torch.where(step < warmup_steps, rise, then(torch.clamp(step - warmup_steps, min=0.0)))

    return Schedule(function, finite=getattr(then, "finite", False))


@factory
def tabulated(values: tuple[float, ...]) -> Schedule:
    """One value for each step, the last one from there on.

    Raises:
        ValueError: a value that is not finite.
    """
    finite(**{f"values[{i}]": value for i, value in enumerate(values)})

    def function(step: Tensor) -> Tensor:
        table = to_device(step.device, torch.tensor(values, dtype=torch.float64))
        at = torch.clamp(step, 0, len(values) - 1).long()
        return table.index_select(0, at.reshape(-1)).view(at.shape)  # table[at] would read `at` on the host

    return Schedule(function, finite=True)


def from_torch_scheduler(make: Callable[[Optimizer], Any], lr: float, total_steps: int) -> Schedule:
    """The learning rates of a torch scheduler, tabulated.

    Args:
        make: `optimizer -> scheduler`, of any kind whose `step()` takes no arguments.
        lr: The initial learning rate of the optimizer.
        total_steps: The number of steps; later steps have the last value.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError: `total_steps` is below 1; a rate that is not finite.
        TypeError: a scheduler whose step takes arguments, such as ReduceLROnPlateau.

    Same as: the scheduler, stepped after every optimizer step.

    >>> rate = from_torch_scheduler(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), 1.0, 4)
    >>> [rate(s).item() for s in (0, 1, 2, 3, 9)]
    [1.0, 1.0, 0.5, 0.5, 0.5]
    """
    steps_at_least("total_steps", total_steps, 1)
    optimizer = SGD([torch.zeros(())], lr)
    scheduler, values = make(optimizer), []
    for _ in range(total_steps):
        values.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        try:
            scheduler.step()
        except TypeError as error:
            raise TypeError(f"a {type(scheduler).__name__} does not depend on the step alone: {error}") from error
    return tabulated(tuple(values))
