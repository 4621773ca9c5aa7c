"""What a stage does in which steps, and to which leaves, as stages that do one thing each."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._base import Phase, Transform
from ._combine import stages
from ._spec import _FACTORIES, Spec


def alternatives(part: Transform) -> list[Phase]:
    """What runs inside a transform that decides when others run, each a transform, and when."""
    if part.phases:
        return [
            phase
            if isinstance(phase.what, Transform)
            else phase._replace(what=dataclasses.replace(part, init=phase.what, phases=()))
            for phase in part.phases
        ]
    held = {name: value for name, value in part.spec.args if isinstance(value, Transform)}
    if len(held) != 1 or not has_phases(part):
        return []
    ((argument, whole),) = held.items()
    inside = stages(whole)
    found = [Phase("each step", stage) for stage in inside] if len(inside) > 1 else alternatives(inside[0])
    return [phase._replace(what=_around(part.spec, argument, phase.what)) for phase in found]


def both(when: str, inner: str) -> str:
    """The second one counts calls, from the first one on."""
    if "each step" in (when, inner):
        return inner if when == "each step" else when
    return f"{when}, {inner.replace('step', 'call')}"


def has_phases(part: Any) -> bool:
    return bool(getattr(part, "phases", ())) or any(has_phases(child) for child in part.spec.children)


def _around(spec: Spec, argument: str, stage: Any) -> Transform:
    """What a factory makes of one stage of what it was given; the stage itself where that is none of its business."""
    try:
        made: Transform = _FACTORIES[spec.name](**{**dict(spec.args), argument: stage})
    except TypeError:  # such as a codec around a stage that sends nothing
        return stage
    return dataclasses.replace(made, sums=made.sums or stage.sums)  # of `masked` too, where its stage is told the lane
