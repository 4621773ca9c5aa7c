"""What a stage does in which steps, and to which leaves, as stages that do one thing each."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._base import Transform
from ._by_path import label_of, masked
from ._combine import stages
from ._spec import _FACTORIES, Spec


def alternatives(part: Transform) -> list[tuple[Transform, str]]:
    """What runs inside a transform that decides when others run."""
    spec = part.spec
    if part.phases:
        return [
            (what if isinstance(what, Transform) else dataclasses.replace(part, init=what, phases=()), when)
            for when, what in part.phases
        ]
    if not _has_phases(part):
        return []
    if spec.name == "partition":
        return [(_part_of_partition(spec["parts"], pattern), "each step") for pattern in spec["parts"]]
    holds = [name for name, value in spec.args if isinstance(value, Transform)]
    if len(holds) != 1:
        return []
    inside = stages(spec[holds[0]])
    if len(inside) > 1:
        return [(_around(spec, holds[0], stage), "each step") for stage in inside]
    return [(_around(spec, holds[0], stage), when) for stage, when in alternatives(inside[0])]


def is_told(part: Transform, i: int) -> bool:
    """Whether the lane goes to this alternative: of a partition, to the first part that reduces."""
    if part.spec.name != "partition":
        held = [value for _, value in part.spec.args if isinstance(value, Transform)]
        return len(held) != 1 or is_told(held[0], i)
    return i == next((j for j, each in enumerate(part.spec["parts"].values()) if each.sums), None)


def both(when: str, inner: str) -> str:
    """The second one counts calls, from the first one on."""
    if "each step" in (when, inner):
        return inner if when == "each step" else when
    return f"{when}, {inner.replace('step', 'call')}"


def _has_phases(part: Any) -> bool:
    return bool(getattr(part, "phases", ())) or any(_has_phases(child) for child in part.spec.children)


def _around(spec: Spec, argument: str, stage: Transform) -> Transform:
    """What a factory makes of one stage of what it was given; the stage itself where that is none of its business."""
    serves = {"cast": stage.wired, "compress": stage.wired, "error_feedback": stage.loses, "loco": stage.loses}
    if not serves.get(spec.name, True):  # such as a codec around a stage that sends nothing
        return stage
    made: Transform = _FACTORIES[spec.name](**{**dict(spec.args), argument: stage})
    return made


def _part_of_partition(parts: dict[Any, Transform], pattern: Any) -> Transform:
    def which(path: str) -> bool:
        return label_of(parts, path) == pattern

    which.__qualname__ = repr(pattern)
    return masked(parts[pattern], which)
