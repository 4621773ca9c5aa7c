"""How a step runs a hook, read off its spec."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

from ._base import Pipeline, Transform
from ._combine import chain, stages
from ._spec import _FACTORIES
from .axes._primitive import names

AXES = ("axis", "local", "node")  # the arguments of our factories that name axes


class Plan(NamedTuple):
    """A hook in four parts, of which the first two exclude each other.

    reduce: a `plain` stage, `mean` or `sum_over`, where that comes first and no later stage reduces: buckets are summed in
        place while backward goes on, and its division is left to the optimizer's kernel.
    early: the stages before the first that needs the whole tree, as one transform: run on each bucket
        while backward goes on.
    clip: a `clip_by_global_norm` that stands alone between `reduce` and the optimizer: it too becomes
        part of the kernel's scale.
    rest: the stages that run on the whole tree after that.
    axes: the axes that the ranks of a step share: all that the hook may communicate over.
    carries: whether the step's lane rides with the hook's own messages.
    """

    reduce: Transform | None
    early: Transform | None
    clip: Transform | None
    rest: tuple[Transform, ...]
    axes: tuple[str, ...]
    carries: bool

    @property
    def over(self) -> str | None:
        """What `reduce` divides by; None for a sum."""
        assert self.reduce is not None and self.reduce.reduction is not None
        return self.reduce.reduction.over

    @property
    def by_weight(self) -> bool:
        """Whether ranks count in it by their weights, else by having a batch."""
        return self.over in (None, "weight")


def make_plan(hook: Transform, mesh_axes: Collection[str]) -> Plan:
    parts = stages(hook)
    reach = axes_of(hook, mesh_axes)
    axes = tuple(name for name in mesh_axes if name in reach) or tuple(mesh_axes)
    first = parts[0] if parts else None
    if first is not None and first.plain and first.reduction is not None:
        own = names(first.reduction.axis)
        # Where a later stage communicates too, only the last one knows the sums over all ranks.
        if reach <= set(own) and not any(part.sums for part in parts[1:]):
            if len(parts) == 2 and parts[1].spec.name == "clip_by_global_norm":
                return Plan(first, None, parts[1], (), own, True)
            return Plan(first, None, None, tuple(parts[1:]), own, True)
    whole = next((i for i, part in enumerate(parts) if part.scope == "tree"), len(parts))
    carries = hook.sums is not None and _summed_over(hook, mesh_axes) >= set(axes)
    return Plan(None, chain(*parts[:whole]) if whole else None, None, tuple(parts[whole:]), axes, carries)


def axes_of(hook: Transform, mesh_axes: Collection[str]) -> set[str]:
    """The axes that a transform may communicate over: those in its arguments; all, where a function may do anything."""
    if not hook.spec.name or "function" in dict(hook.spec.args):
        return set(mesh_axes)
    found = set[str]()
    ours = str(getattr(_FACTORIES.get(hook.spec.name), "__module__", "")).startswith(f"{__package__}.")
    for argument, value in hook.spec.args:
        for name in value if isinstance(value, tuple) else (value,):
            # Of others' factories any argument may name one.
            if isinstance(name, str) and (argument in AXES or (name in mesh_axes and not ours)):
                found.add(name)
    return found.union(*(axes_of(child, mesh_axes) for child in hook.spec.children if isinstance(child, Transform)))


def warn_if_silent(what: Transform | Pipeline, mesh_axes: tuple[str, ...], ranks: int, stacklevel: int) -> None:
    """Warn if nothing in a hook or a pipeline communicates, and no `noop` in it says that this is meant."""
    parts = [part for part in (what.hook, what.after) if part is not None] if isinstance(what, Pipeline) else [what]
    if not any(axes_of(part, mesh_axes) or _holds(part, "noop") for part in parts):
        warnings.warn(
            f"nothing in {what!r} reduces over the {ranks} ranks, so that each trains on its own batches alone; put "
            f"tx.mean({mesh_axes[0]!r}) into it, or tx.noop() where that is meant",
            stacklevel=stacklevel + 1,
        )


def _holds(part: Any, name: str) -> bool:
    return part.spec.name == name or any(_holds(child, name) for child in part.spec.children)


def _summed_over(hook: Transform, mesh_axes: Collection[str]) -> set[str]:
    """The axes over which the sums of a transform are sums."""
    children = [child for child in hook.spec.children if isinstance(child, Transform)]
    if hook.sums is None:
        return set()
    if hook.spec.name == "chain":
        return set[str]().union(*(_summed_over(child, mesh_axes) for child in children))
    if children:
        return set.intersection(*(_summed_over(child, mesh_axes) for child in children))
    return axes_of(hook, mesh_axes)


def takes_flat(part: Transform) -> bool:
    """Whether a transform may be given a bucket as one flat tensor: not where something in it looks at paths."""
    return part.scope in ("element", "message") and not part.named
