"""Hyperparameters: numbers, and schedules, which are functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..base import Count, Index, Spec, Specified, checks, factory, specs, trees

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
        value: Any = hyper(step if step.device.type == "mps" else step.double())
    except TypeError as error:
        raise TypeError(
            f"the schedule {specs.shown(hyper)} does not take the number of the step, a 0-d tensor: {error}. A schedule "
            f"of numbers, such as optax's, is lambda step: float(schedule(int(step)))"
        ) from error
    if getattr(hyper, "finite", False):
        return value  # type: ignore[no-any-return]

    def returned(expected: str) -> str:
        at = int(step) if not isinstance(step, Tensor) or trees.readable_without_sync(step) else "that is on a device"
        return f"the schedule {specs.shown(hyper)} returned {value!r} in step {at}, expected {expected}"

    if isinstance(value, Tensor):
        dense = value.layout is torch.strided and (step.is_meta or not value.is_meta)
        if not dense or not is_one_number(value):
            raise ValueError(returned("a dense tensor of one real number"))
        if not trees.readable_without_sync(value):
            return value.reshape(())
    elif not checks.is_number(value):
        raise TypeError(returned("a number"))
    if not checks.is_finite(float(value) if isinstance(value, Tensor) else value):
        raise ValueError(returned("a finite number"))
    return value.reshape(()) if isinstance(value, Tensor) else value  # type: ignore[no-any-return]


def is_one_number(value: Tensor) -> bool:
    return value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool


def watched(spec: Spec, injected: bool = False) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters of an optimizer that may become non-finite while training: (name, schedule or tensor).

    Those of an optimizer inside it are included.

    Args:
        injected: Whether an `inject_hyperparameters` around it reads the schedules.

    Raises:
        TypeError: another hyperparameter than lr follows a schedule, and none does.
    """
    found: list[tuple[str, Any]] = []
    for name, value in spec.args if spec.factory else ():
        if hasattr(value, "step_param"):
            found += watched(value.spec, injected or spec.name == "inject_hyperparameters")
        elif callable(value) and name != "lr" and not injected and spec.is_ours:
            remedy = "only lr can do so by itself, so wrap the optimizer in inject_hyperparameters(...)"
            raise TypeError(f"{spec.name}: {name} follows the schedule {specs.shown(value)}; {remedy}")
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
        if isinstance(value, Tensor) and not trees.readable_without_sync(value):
            found += [(name, 0.0)] if value.is_meta else []  # `explain` counts it
            continue
        number = float(value)
        if value is hyper and not checks.is_finite(number):
            raise ValueError(f"{name} must be a finite number, got {hyper!r}")
        found.append((name, number))
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(Specified):
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

    def __post_init__(self) -> None:
        self.identify(function=self.function)


@factory
def linear(start: float, end: float, total_steps: Count) -> Schedule:
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
    checks.finite(start=start, end=end)
    return Schedule(lambda step: start + (end - start) * torch.clamp(step / total_steps, max=1.0), finite=True)


@factory
def cosine(start: float, total_steps: Count, end: float = 0.0) -> Schedule:
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
    checks.finite(start=start, end=end)

    def function(step: Tensor) -> Tensor:
        done = torch.clamp(step / total_steps, max=1.0)
        return end + (start - end) * 0.5 * (1 + torch.cos(math.pi * done))

    return Schedule(function, finite=True)


@factory
def warmup_cosine(peak: float, warmup_steps: Index, total_steps: int, end: float = 0.0) -> Schedule:
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
    checks.finite(peak=peak, end=end)
    checks.whole_number("total_steps", total_steps, warmup_steps + 1)
    rest = cosine(peak, total_steps - warmup_steps, end)

    def function(step: Tensor) -> Tensor:
        rise = peak * (step + 1) / max(warmup_steps, 1)
        return torch.where(step < warmup_steps, rise, rest(torch.clamp(step - warmup_steps, min=0.0)))

    return Schedule(function, finite=True)


@factory
def warmup(warmup_steps: Index, then: Callable[[Any], Any]) -> Schedule:
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
    checks.finite(**{f"values[{i}]": value for i, value in enumerate(values)})

    def function(step: Tensor) -> Tensor:
        table = trees.to_device(step.device, torch.tensor(values, dtype=torch.float64))
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
    checks.whole_number("total_steps", total_steps, 1)
    optimizer = SGD([torch.zeros(())], lr)
    scheduler, values = make(optimizer), []
    for _ in range(total_steps):
        values.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return tabulated(tuple(values))


def not_negative(**values: Any) -> None:
    """Raise unless each is a finite number, at least 0, a tensor of one element, or a schedule.

    The values of tensors are checked where that does not wait for a device, schedules when they are called.

    Raises:
        ValueError: a number below 0, infinite or NaN; a tensor of several elements.
        TypeError: none of these.
    """
    _require("at least 0 and finite", lambda number: number >= 0 and checks.is_finite(number), values)


def a_number(**values: Any) -> None:
    """Raise for a hyperparameter that is not finite, or neither number, tensor nor schedule."""
    _require("a finite number", checks.is_finite, values)


def no_schedule(**values: Any) -> None:
    """As `a_number`, where a schedule is refused too."""
    _require("a finite number", checks.is_finite, values, schedules=False)


def within(least: float, most: float, **values: Any) -> None:
    """Raise ValueError for a hyperparameter outside a range, TypeError for one that is no number."""
    _require(f"from {least:g} to {most:g}", lambda number: least <= number <= most, values)


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
    named = {"betas[0]": beta1, "betas[1]": beta2}
    _require("at least 0 and below 1", lambda number: 0.0 <= number < 1.0, named, schedules=False)
    return tuple(beta.reshape(()) if isinstance(beta, Tensor) else beta for beta in (beta1, beta2))  # type: ignore[return-value]


def _require(what: str, fine: Callable[[Any], bool], values: Mapping[str, Any], schedules: bool = True) -> None:
    for name, value in values.items():
        if callable(value) and not schedules:
            raise TypeError(f"{name} must be a number or a tensor of one element, got {value!r}")
        number = _number(name, value)
        if number is not None and not fine(number):
            raise ValueError(f"{name} must be {what}, got {value!r}")


def _number(name: str, value: Any) -> Any:
    """The value as the host knows it; None if it does not."""
    if isinstance(value, Tensor):
        if not is_one_number(value):
            form = f"{tuple(value.shape)}, {value.dtype}"
            raise ValueError(f"{name} must be a number or a tensor of one real element, got one of shape {form}")
        return float(value) if trees.readable_without_sync(value) else None
    if checks.is_number(value):
        return value
    if callable(value) and not isinstance(value, type):
        return _of_the_step(name, value)
    hint = f"; write float({value!r})" if isinstance(value, str) else ""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        hint = "; tabulate it with from_torch_scheduler(make, lr, total_steps), or hand fjoin.Optimizer to it"
    raise TypeError(f"{name} must be a number, a tensor of one element or a schedule, got {value!r}{hint}")


def _of_the_step(name: str, schedule: Callable[[Any], Any]) -> None:
    """Raise ValueError where a schedule gives a number another value than a tensor, or step 0 two values."""
    start = torch.zeros((), dtype=torch.float64)
    try:
        first, again, of_number = (float(schedule(step)) for step in (start, start.clone(), 0))
    except Exception:  # it may take tensors only; its values are looked at where it is used
        return
    if not math.isclose(first, again) and first == first:
        both = f"{name}: the schedule {specs.shown(schedule)} returned {first} and then {again} for step 0"
        why = "it may be called several times in a step, so it must be a function of the step alone"
        raise ValueError(f"{both}; {why}, without a counter or a draw")
    if not math.isclose(first, of_number, rel_tol=1e-3) and first == first:
        both = f"{of_number} for 0, but {first} for a 0-d tensor"
        raise ValueError(f"{name}: the schedule {specs.shown(schedule)} returned {both}; use int(step)")
