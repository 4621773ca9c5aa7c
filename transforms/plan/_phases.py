"""The phases of a transform, such as a warm-up, read off its spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from .._counter import Period
from .._spec import Spec
from .._transform import Transform

_PERIODIC = {"every": "transform", "outer_step": "hook"}  # factories with a period, and the argument that it is of
_STARTS = ("warmup", "start")  # arguments that give the step in which a transform changes its behaviour


class Phase(NamedTuple):
    """Steps in which a transform sends the same messages."""

    when: str  # in words, such as "from step 3"
    step: int  # the first step, counted from 0
    ends: bool = False  # whether there is a last step, as in a warm-up


def running(part: Transform, step: int | None, at_end: bool = False) -> list[tuple[Transform, int | None]]:
    """The transforms that run inside `part` in a step, each with its own number of the step; for step=None all.

    Args:
        at_end: Whether `part` runs on parameters, at the end of a step. A switch then flushes the first transform.
    """
    if step is not None and part.spec.name == "switch_after":
        start, before = part.spec["step"], part.spec["before"]
        if step >= start:
            return [(part.spec["after"], step - start)]
        return [(before, step), *(flushed(before, start) if at_end and step == start - 1 else [])]
    if step is not None and part.spec.name in _PERIODIC:
        period = Period.of(part.spec)
        return [(part.spec[_PERIODIC[part.spec.name]], period.window(step))] if period.due(step) else []
    return [(child, step) for child in part.spec.children if isinstance(child, Transform)]


def phases(part: Transform, sends: Callable[[Transform, int], Any], at_end: bool = False) -> list[Phase]:
    """The phases of a transform in order.

    Phases that send nothing, such as the steps between two runs of `every`, are omitted.

    Args:
        sends: `(transform, step) -> messages`, for a transform without others inside.
        at_end: As for `running`.
    """
    if part.spec.name == "switch_after":
        start = part.spec["step"]
        early = [phase for phase in phases(part.spec["before"], sends, at_end) if phase.step < start]
        found = [Phase(_both(f"before step {start}", when), step, True) for when, step, _ in early]
        if at_end and flushed(part.spec["before"], start):
            found.append(Phase(f"step {start - 1}", start - 1, True))
        since = f"from step {start}" if start else "each step"
        after = phases(part.spec["after"], sends, at_end)
        return [*found, *(Phase(_both(since, when), start + step, ends) for when, step, ends in after)]
    if part.spec.name in _PERIODIC:
        steps, first, other = Period.of(part.spec)
        when = f"every {steps} steps" + (f", from step {first}" if first >= steps else "")
        when += f", except every {other} steps" if other is not None else ""
        shift = steps * (other is not None and first % other == 0)  # to a call that runs
        inside = phases(part.spec[_PERIODIC[part.spec.name]], sends, at_end)
        return [Phase(_both(when, inner), first + shift + step * steps, ends) for inner, step, ends in inside]
    if part.spec.name == "accumulate":
        steps, inside = part.spec["steps"], phases(part.spec["transform"], sends, at_end)
        return [Phase(_both(f"once in {steps} calls", inner), step, ends) for inner, step, ends in inside]
    ends = [value for name, value in part.spec.args if name in _STARTS and type(value) is int and value > 0]
    if ends:
        starts = _changes(0, ends[0], lambda step: sends(part, step))
        return [Phase(*one) for one in _between(starts)]
    inner = [phases(child, sends, at_end) for child, _ in running(part, None)]
    several = [own for own in inner if own != [Phase("each step", 0)]]
    return [phase for own in several for phase in own] or [Phase("each step", 0)]


def flushed(part: Transform, calls: int) -> list[tuple[Transform, int]]:
    """The transforms that run in a flush after this many calls, each with its own number of the call."""
    if not calls:
        return []
    if part.spec.name == "every":
        period, child = Period.of(part.spec), part.spec["transform"]
        ended, is_open = period.ended(calls), period.open(calls)
        return [(child, ended)] * is_open + flushed(child, ended + is_open)
    if part.spec.name == "outer_step":
        period, hook = Period.of(part.spec), part.spec["hook"]
        begun = range(max(calls - dict(part.spec.args).get("delay", 0), 0), calls)
        waiting = [(hook, period.window(past)) for past in begun if period.due(past)]
        return waiting + [(hook, period.ended(calls))] * period.open(calls)
    if part.spec.name == "switch_after" and calls >= (start := part.spec["step"]):
        return flushed(part.spec["after"], calls - start)
    inside = running(part, calls - 1)
    return [one for child, at in inside if at is not None for one in flushed(child, at + 1)]


def unfinished(part: Transform, steps: int) -> bool:
    """Whether, after this many steps, a window of several steps has begun and its transform has not run."""
    return bool(flushed(part, steps))


def changes_with_steps(part: Transform) -> bool:
    """Whether a transform behaves differently in some steps, according to its spec."""
    own = part.spec.name in ("switch_after", "accumulate", *_PERIODIC) or any(
        name in _STARTS for name, _ in part.spec.args
    )
    return own or any(changes_with_steps(child) for child, _ in running(part, None))


def shown(part: Transform, step: int) -> str:
    """The repr of the transform that runs in a step."""
    return repr(_in_step(part, step))


def _in_step(part: Any, step: int) -> Any:
    if not isinstance(part, Transform):
        return part
    if part.spec.name in ("switch_after", "every", "accumulate"):
        inside = running(part, step)
        return _in_step(*inside[0]) if inside else part  # type: ignore[arg-type]

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(replaced(item) for item in value)
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return _in_step(value, step)

    spec = Spec(part.spec.name, tuple((name, replaced(value)) for name, value in part.spec.args))
    return dataclasses.replace(part, spec=spec) if spec.name else part


def _changes(low: int, high: int, sends: Callable[[int], Any]) -> list[int]:
    """The steps from `low` to `high` in which the messages change.

    It is a binary search: if the messages are equal at both ends of a range, they are assumed equal in between.
    """
    found, todo, known = {low}, [(low, high)], {low: sends(low), high: sends(high)}
    while todo:
        low, high = todo.pop()
        if known[low] == known[high]:
            continue
        if high - low == 1:
            found.add(high)
            continue
        middle = (low + high) // 2
        known[middle] = sends(middle)
        todo += [(low, middle), (middle, high)]
    return sorted(found)


def _between(starts: list[int]) -> list[tuple[str, int, bool]]:
    """For each start: the steps up to the next start, in words; the start; and whether there is a next one.

    >>> _between([0, 3])
    [('before step 3', 0, True), ('from step 3', 3, False)]
    """
    found = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        limits = [f"from step {start}"] * (start > 0) + ([] if end is None else [f"before step {end}"])
        found.append((", ".join(limits) or "each step", start, end is not None))
    return found


def _both(when: str, inner: str) -> str:
    """Both conditions in words; `inner` counts calls that begin with the first step of `when`."""
    if "each step" in (when, inner):
        return inner if when == "each step" else when
    return f"{when}, {inner.replace('step', 'call')}"
