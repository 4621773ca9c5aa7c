"""When a transform runs those inside it, and when its own messages change.

A transform has its `Timing` as a field, since whoever plans a run must know it before the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ._transform import Transform


_STARTS = ("warmup", "start")  # arguments of a factory outside fjoin that give the step in which its messages change


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
class Switch:
    """One transform before a step, another one from it on, whose calls are counted from there."""

    step: int
    before: Transform
    after: Transform


@dataclass(frozen=True)
class Periodic:
    """A transform in the calls of a period. It is given the number of the window that ends there.

    delay: calls between the end of a window and its messages.
    alone: whether nothing else is done with what it returns.
    """

    period: Period
    transform: Transform
    delay: int = 0
    alone: bool = True


@dataclass(frozen=True)
class Windows:
    """A transform at the end of windows of some calls; the others send nothing, and end no step."""

    steps: int
    transform: Transform


@dataclass(frozen=True)
class Changes:
    """A transform whose own messages change with these steps, in ascending order."""

    steps: tuple[int, ...]


# None: those inside run in each step.
Timing: TypeAlias = Switch | Periodic | Windows | Changes | None


def children(part: Any) -> list[Transform]:
    """The transforms inside another one."""
    return [child for child in part.spec.children if hasattr(child, "timing")]


def changes_with_steps(part: Transform) -> bool:
    """Whether a transform behaves differently in some steps."""
    starts = [value for name, value in part.spec.args if name in _STARTS]
    own = part.timing is not None or any(type(value) is not int or value > 0 for value in starts)
    return own or any(changes_with_steps(child) for child in children(part))


def running(part: Transform, step: int | None, at_end: bool = False) -> list[tuple[Transform, int | None]]:
    """The transforms that run inside `part` in a step, each with its own number of the step; for step=None all.

    Args:
        at_end: Whether `part` runs on parameters, at the end of a step. A switch then flushes the first transform.
    """
    when = part.timing
    if step is not None and isinstance(when, Switch):
        if step >= when.step:
            return [(when.after, step - when.step)]
        return [
            (when.before, step),
            *(flushed(when.before, when.step) if at_end and step == when.step - 1 else []),
        ]
    if step is not None and isinstance(when, Periodic):
        at = step - when.delay
        return [(when.transform, when.period.window(at))] if when.period.due(at) else []
    return [(child, step) for child in children(part)]


def flushed(part: Transform, calls: int) -> list[tuple[Transform, int]]:
    """The transforms that run in a flush after this many calls, each with its own number of the call."""
    if not calls:
        return []
    when = part.timing
    if isinstance(when, Periodic):
        period, inside = when.period, when.transform
        ended, is_open = period.ended(calls), period.open(calls)
        begun = range(max(calls - when.delay, 0), calls)
        waiting = [(inside, period.window(past)) for past in begun if period.due(past)]
        return [*waiting, *[(inside, ended)] * is_open, *flushed(inside, ended + is_open)]
    if isinstance(when, Switch) and calls >= when.step:
        return flushed(when.after, calls - when.step)
    inside_now = running(part, calls - 1)
    return [one for child, at in inside_now if at is not None for one in flushed(child, at + 1)]


def unfinished(part: Transform, steps: int) -> bool:
    """Whether, after this many steps, a window of several steps has begun and its transform has not run."""
    return bool(flushed(part, steps))
