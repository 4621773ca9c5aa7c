"""The phases of a transform, such as a warm-up, read off its spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..spec._spec import Spec
from ..transform._timing import Changes, Periodic, Switch, Windows, children, flushed, running
from ..transform._transform import Transform

_STARTS = ("warmup", "start")  # arguments of a factory outside fjoin that give the step in which its messages change


class Phase(NamedTuple):
    """Steps in which a transform sends the same messages."""

    when: str  # in words, such as "from step 3"
    step: int  # the first step, counted from 0
    ends: bool = False  # whether there is a last step, as in a warm-up


def phases(part: Transform, sends: Callable[[Transform, int], Any], at_end: bool = False) -> list[Phase]:
    """The phases of a transform in order.

    Phases that send nothing, such as the steps between two runs of `every`, are omitted.

    Args:
        sends: `(transform, step) -> messages`, for a transform without others inside.
        at_end: As for `running`.
    """
    when = part.timing
    if isinstance(when, Switch):
        return _of_switch(when, sends, at_end)
    if isinstance(when, Periodic):
        steps, first, other = when.period
        often = f"every {steps} steps" + (f", from step {first}" if first >= steps else "")
        often += f", except every {other} steps" if other is not None else ""
        shift = steps * (other is not None and first % other == 0)  # to a call that runs
        inside = phases(when.transform, sends, at_end)
        begin = first + shift + when.delay
        return [Phase(_both(often, inner), begin + step * steps, ends) for inner, step, ends in inside]
    if isinstance(when, Windows):
        inside = phases(when.transform, sends, at_end)
        return [Phase(_both(f"once in {when.steps} calls", inner), step, ends) for inner, step, ends in inside]
    if isinstance(when, Changes):
        starts, sent = [0], sends(part, 0)
        for step in when.steps:
            before, sent = sent, sends(part, step)
            starts += [step] if sent != before else []
        return [Phase(*one) for one in _between(starts)]
    if last := _end_of_start(part):
        return [Phase(*one) for one in _between(_changes(0, last, lambda step: sends(part, step)))]
    inner = [phases(child, sends, at_end) for child, _ in running(part, None)]
    several = [own for own in inner if own != [Phase("each step", 0)]]
    return [phase for own in several for phase in own] or [Phase("each step", 0)]


def _of_switch(when: Switch, sends: Callable[[Transform, int], Any], at_end: bool) -> list[Phase]:
    start = when.step
    early = [phase for phase in phases(when.before, sends, at_end) if phase.step < start]
    found = [Phase(_both(f"before step {start}", words), step, True) for words, step, _ in early]
    if at_end and flushed(when.before, start):
        found.append(Phase(f"step {start - 1}", start - 1, True))
    since = f"from step {start}" if start else "each step"
    after = phases(when.after, sends, at_end)
    return [*found, *(Phase(_both(since, words), start + step, ends) for words, step, ends in after)]


def _end_of_start(part: Transform) -> int | None:
    """The step at which a transform that says nothing of its timing changes, if its arguments name one."""
    return next((value for name, value in part.spec.args if name in _STARTS and type(value) is int and value > 0), None)


def changes_with_steps(part: Transform) -> bool:
    """Whether a transform behaves differently in some steps."""
    own = part.timing is not None or any(name in _STARTS for name, _ in part.spec.args)
    return own or any(changes_with_steps(child) for child in children(part))


def shown(part: Transform, step: int) -> str:
    """The repr of the transform that runs in a step."""
    return repr(_in_step(part, step))


def _in_step(part: Any, step: int) -> Any:
    if not isinstance(part, Transform):
        return part
    when = part.timing
    if isinstance(when, (Switch, Windows)) or (isinstance(when, Periodic) and when.alone):
        inside = running(part, step)
        return _in_step(*inside[0]) if inside else part  # type: ignore[arg-type]

    def replaced(value: Any) -> Any:
        if type(value) in (list, tuple):
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
