"""How a step runs a hook, read off its spec."""

from __future__ import annotations

from typing import NamedTuple

from ._base import Transform
from ._combine import chain, stages


class Plan(NamedTuple):
    """A hook in four parts, of which the first two exclude each other.

    reduce: `mean` or `sum_over` where that comes first: buckets are summed in place while backward
        goes on, and its division is left to the optimizer's kernel.
    early: the stages before the first that needs the whole tree, as one transform: run on each bucket
        while backward goes on.
    clip: the norm of a `clip_by_global_norm` that stands alone between `reduce` and the optimizer: it
        too becomes part of the kernel's scale.
    rest: the stages that run on the whole tree after that.
    """

    reduce: Transform | None
    early: Transform | None
    clip: float | None
    rest: tuple[Transform, ...]


def make_plan(hook: Transform) -> Plan:
    parts = stages(hook)
    # Where a later stage reduces too, only the last one knows the sums over all ranks.
    if parts and parts[0].spec.name in ("mean", "sum_over") and not any(part.sums for part in parts[1:]):
        if len(parts) == 2 and parts[1].spec.name == "clip_by_global_norm":
            return Plan(parts[0], None, parts[1].spec["max_norm"], ())
        return Plan(parts[0], None, None, tuple(parts[1:]))
    whole = next((i for i, part in enumerate(parts) if part.scope == "tree"), len(parts))
    return Plan(None, chain(*parts[:whole]) if whole else None, None, tuple(parts[whole:]))


def takes_flat(part: Transform) -> bool:
    """Whether a transform may be given a bucket as one flat tensor."""
    return part.scope in ("element", "message")
