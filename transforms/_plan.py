"""How a step runs a hook, read off its spec."""

from __future__ import annotations

from typing import NamedTuple

from ._base import Transform
from ._combine import stages


class Plan(NamedTuple):
    """A hook in three parts.

    reduce: `mean` or `sum_over` where that comes first: buckets are summed in place while backward
        goes on, and its division is left to the optimizer's kernel.
    clip: the norm of a `clip_by_global_norm` that stands alone between it and the optimizer: it too
        becomes part of the kernel's scale.
    rest: the stages that run on the whole tree after that.
    """

    reduce: Transform | None
    clip: float | None
    rest: tuple[Transform, ...]


def make_plan(hook: Transform) -> Plan:
    parts = stages(hook)
    # Where a later stage reduces too, only the last one knows the sums over all ranks.
    if not parts or parts[0].spec.name not in ("mean", "sum_over") or any(part.sums for part in parts[1:]):
        return Plan(None, None, tuple(parts))
    if len(parts) == 2 and parts[1].spec.name == "clip_by_global_norm":
        return Plan(parts[0], parts[1].spec["max_norm"], ())
    return Plan(parts[0], None, tuple(parts[1:]))
