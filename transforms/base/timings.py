"""When a transform runs those inside it, and when its own messages change.

A transform has its `Timing` as a field, since whoever plans a run must know it before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .checks import axis_names

if TYPE_CHECKING:
    from ._transform import Transform


# Transforms, each with its own number of the call, and whether it is flushed after so many calls instead of called.
TimedRuns: TypeAlias = "list[tuple[Transform, int, bool]]"


class Period(NamedTuple):
    """The calls in which a transform runs: first, first + steps, ..., counted from 0.

    except_every: calls whose number is a multiple of this are left to another transform; None: none is.
    """

    steps: int
    first: int
    except_every: int | None = None

    def ends(self, call: int) -> bool:
        """Whether a window ends with this call."""
        return call >= self.first and (call - self.first) % self.steps == 0

    def due(self, call: int) -> bool:
        """Whether the transform runs in this call."""
        return self.ends(call) and (self.except_every is None or call % self.except_every != 0)

    def window(self, call: int) -> int:
        """The number of the window that ends with this call, from 0."""
        return (call - self.first) // self.steps

    def ended(self, calls: int) -> int:
        """The number of windows that have ended after this many calls."""
        return max(self.window(calls - 1) + 1, 0)

    def open(self, calls: int) -> bool:
        """Whether, after this many calls, a window has begun and not ended."""
        return calls > 0 and not self.ends(calls - 1)


@dataclass(frozen=True)
class Timing:
    """When a transform runs those inside it; `Transform(..., timing=None)`: in each call, with messages that never
    change.

    Attributes:
        runs: (call, at_end) -> what runs in that call, counted from 0: (transform, its own number of the call, False),
            or (transform, its own calls so far, True) for one that is flushed. None: all, with the same number; only
            the messages change. at_end: whether they run on parameters, at the end of a step.
        flushes: calls -> what runs in a flush after so many calls, in the same form. None: those of what runs in the
            last one.
    """

    runs: Callable[[int, bool], TimedRuns] | None = None
    flushes: Callable[[int], TimedRuns] | None = None


def of_switch(step: int, before: Transform, after: Transform) -> Timing:
    """One transform before a step, another one from it on. At the end of a step, the first is flushed at the switch."""

    def runs(call: int, at_end: bool) -> TimedRuns:
        if call >= step:
            return [(after, call - step, False)]
        return [(before, call, False), *[(before, step, True)] * (at_end and call == step - 1)]

    return Timing(runs, lambda calls: [(after, calls - step, True) if calls >= step else (before, calls, True)])


def of_period(period: Period, transform: Transform, delay: int = 0) -> Timing:
    """A transform in the calls of a period, or `delay` calls behind them.

    It is given the number of the window that ends there.
    """

    def runs(call: int, at_end: bool) -> TimedRuns:
        at = call - delay
        return [(transform, period.window(at), False)] if period.due(at) else []

    def flushes(calls: int) -> TimedRuns:
        ended, is_open = period.ended(calls), period.open(calls)
        begun = [period.window(past) for past in range(max(calls - delay, 0), calls) if period.due(past)]
        windows = [*begun, *[ended] * is_open]
        return [*((transform, window, False) for window in windows), (transform, ended + is_open, True)]

    return Timing(runs, flushes)


def children(part: Any) -> list[Transform]:
    """The transforms inside another one."""
    return [child for child in part.spec.children if hasattr(child, "timing")]


def changes_with_steps(part: Transform) -> bool:
    """Whether a transform behaves differently in some steps."""
    return part.timing is not None or any(changes_with_steps(child) for child in children(part))


def running(part: Transform, step: int | None, at_end: bool = False) -> list[tuple[Transform, int | None]]:
    """The transforms that run inside `part` in a step, each with its own number of the step; for step=None all."""
    if step is None or part.timing is None or part.timing.runs is None:
        return [(child, step) for child in children(part)]
    return [*_opened(part.timing.runs(step, at_end))]


def reduced_over(part: Transform, step: int | None = None, at_end: bool = False) -> set[str]:
    """The axes over which a transform makes all of its input equal in a step; for step=None in each one that runs it."""
    axis = part.facts.equalizes if part.facts.reduces is None else part.facts.reduces.axis
    if axis is not None:
        return set(axis_names(axis))
    inside = [reduced_over(child, at, at_end) for child, at in running(part, step, at_end)] if part.facts.wraps else []
    if part.facts.wraps == "stages":
        return set().union(*inside)
    return set.intersection(*inside) if inside else set()


def flushed(part: Transform, calls: int) -> list[tuple[Transform, int]]:
    """The transforms that run in a flush after this many calls, each with its own number of the call."""
    if not calls:
        return []
    if part.timing is not None and part.timing.flushes is not None:
        return _opened(part.timing.flushes(calls))
    inside_now = running(part, calls - 1)
    return [one for child, at in inside_now if at is not None for one in flushed(child, at + 1)]


def _opened(runs: TimedRuns) -> list[tuple[Transform, int]]:
    """Those that are called, with what runs inside in the place of those that are flushed."""
    return [one for child, at, flush in runs for one in (flushed(child, at) if flush else [(child, at)])]
