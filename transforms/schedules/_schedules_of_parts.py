"""Schedules of several parts, and those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .._check import finite, is_finite, positive
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
        raise TypeError(f"warmup: then must be a schedule, got {then!r}; for a fixed rate pass constant({then!r})")

    def function(step: Tensor) -> Tensor:
        rise = then(torch.zeros_like(step)) * (step + 1) / max(warmup_steps, 1)
        return torch.where(step < warmup_steps, rise, then(torch.clamp(step - warmup_steps, min=0.0)))

    return Schedule(function, finite=getattr(then, "finite", False))


@factory
def piecewise(start: float, factors: Mapping[int, float]) -> Schedule:
    """Constant, and multiplied by a factor at some steps.

    Args:
        start: The first value.
        factors: Step -> the factor by which the value is multiplied from this step on.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError, TypeError: a value that is no finite number.

    Same as: torch.optim.lr_scheduler.MultiStepLR; optax.piecewise_constant_schedule.

    >>> [round(piecewise(1.0, {2: 0.1, 4: 0.5})(s).item(), 3) for s in (0, 1, 2, 3, 4)]
    [1.0, 1.0, 0.1, 0.1, 0.05]
    """

    finite(start=start, **{f"factors[{boundary!r}]": factor for boundary, factor in factors.items()})

    def function(step: Tensor) -> Tensor:
        value = torch.full_like(step, start)
        for boundary, factor in factors.items():
            value = torch.where(step >= boundary, value * factor, value)
        return value

    return Schedule(function, finite=is_finite(start * math.prod(max(1.0, abs(f)) for f in factors.values())))


@factory
def one_cycle(
    peak: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Up to a peak and down again, then constant.

    From peak / div_factor up to `peak` in the first pct_start of the steps; then down to peak / div_factor /
    final_div_factor in the last step, with three_phase by way of peak / div_factor, as fast as it went up.

    Args:
        peak: The largest value.
        total_steps: Steps; at least 1.
        pct_start: Share of the steps on the way up, from 0 to 1.
        anneal: Along half a cosine, or a straight line.
        div_factor, final_div_factor: See above.
        three_phase: See above.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError, TypeError: `total_steps` is below 1, pct_start outside [0, 1], another `anneal`; a factor that is
            not above 0; a value that is no finite number.

    Same as: torch.optim.lr_scheduler.OneCycleLR with cycle_momentum=False.
    Source: Smith and Topin, Super-Convergence, arXiv:1708.07120.

    >>> [round(one_cycle(1.0, 10)(s).item(), 4) for s in (0, 1, 2, 9, 99)]
    [0.04, 0.52, 1.0, 0.0, 0.0]
    """
    finite(peak=peak, pct_start=pct_start, div_factor=div_factor, final_div_factor=final_div_factor)
    steps_at_least("total_steps", total_steps, 1)
    positive("div_factor", div_factor)
    positive("final_div_factor", final_div_factor)
    if not 0 <= pct_start <= 1:
        raise ValueError(f"pct_start must be from 0 to 1, got {pct_start!r}")
    if anneal not in ("cos", "linear"):
        raise ValueError(f"anneal must be 'cos' or 'linear', got {anneal!r}")
    low = peak / div_factor
    phases = [(pct_start * total_steps - 1, low, peak)]  # last step, first and last value
    if three_phase:
        phases.append((2 * pct_start * total_steps - 2, peak, low))
    phases.append((total_steps - 1.0, phases[-1][2], low / final_div_factor))

    def function(step: Tensor) -> Tensor:
        value, begin = torch.full_like(step, phases[-1][2]), 0.0
        found = torch.zeros_like(step, dtype=torch.bool)
        for end, first, last in phases:
            done = ((step - begin) / (end - begin)) if end != begin else torch.ones_like(step)
            along = (1 - torch.cos(math.pi * done)) / 2 if anneal == "cos" else done
            here = ~found & (step <= end)
            value, found, begin = torch.where(here, first + (last - first) * along, value), found | here, end
        return value

    return Schedule(function, finite=True)


@factory
def tabulated(values: tuple[float, ...]) -> Schedule:
    """One value for each step, the last one from there on.

    Args:
        values: At least one.

    Returns:
        A `Schedule`: `step -> value`, 0-d float64, of the steps taken before.

    Raises:
        ValueError, TypeError: no value; one that is no finite number.

    >>> [tabulated((0.1, 0.2))(s).item() for s in (0, 1, 2)]
    [0.1, 0.2, 0.2]
    """
    if not isinstance(values, (tuple, list)) or not values:
        raise ValueError(f"tabulated needs at least one value, in a tuple, got {values!r}")
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
        ValueError: `total_steps` is below 1.
        TypeError: a scheduler whose step takes arguments, such as ReduceLROnPlateau.

    Same as: the scheduler, stepped after every optimizer step.

    >>> from_torch_scheduler(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), 1.0, 4)
    tabulated((1.0, 1.0, 0.5, 0.5))
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
