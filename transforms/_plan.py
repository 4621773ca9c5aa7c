"""How a pipeline runs, read off its spec."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, NamedTuple

from ._base import Pipeline, Transform
from ._combine import chain, stages
from ._spec import _FACTORIES
from .axes._primitive import names

AXES = ("axis", "local", "node")  # the arguments of our factories that name axes
_OURS = "fjoin.transforms."
_BY_STEP = ("switch_after", "every")  # those that run other things in other steps


class Reduced(NamedTuple):
    """What a hook reduces in one step.

    axes: the axes over which it does: their ranks take one step, or leave it out, together. None where it sends nothing.
    equal: whether its own messages make the gradients and the lane equal on all of these ranks.
    """

    axes: tuple[str, ...]
    equal: bool


class Plan(NamedTuple):
    """How a whole pipeline runs. Of the first two at most one is given.

    reduce: a `plain` stage, `mean` or `sum_over`, where that comes first and no later stage reduces: buckets are summed in
        place while backward goes on, and its division is left to the optimizer's kernel.
    early: the stages before the first that needs the whole tree, as one transform: run on each bucket
        while backward goes on.
    clip: a `clip_by_global_norm` that stands alone between `reduce` and the optimizer: it too becomes
        part of the kernel's scale.
    rest: the stages that run on the whole tree after that.
    agree: the axes whose ranks loop together, in all steps: those of the hook, of the parameter transform and of the buffers'.
    """

    hook: Transform
    mesh_axes: tuple[str, ...]
    agree: tuple[str, ...]
    always: Reduced | None  # what the hook reduces, where that is the same in all steps
    reduce: Transform | None = None
    early: Transform | None = None
    clip: Transform | None = None
    rest: tuple[Transform, ...] = ()

    @property
    def over(self) -> str | None:
        """What `reduce` divides by; None for a sum."""
        assert self.reduce is not None and self.reduce.reduction is not None
        return self.reduce.reduction.over

    @property
    def by_weight(self) -> bool:
        """Whether ranks count in it by their weights, else by having a batch."""
        return self.over in (None, "weight")

    def reduced(self, step: int) -> Reduced:
        """What the hook reduces in a step, counted from 0."""
        return self.always or _reduced(self.hook, self.mesh_axes, step)

    def lane_messages(self, step: int) -> tuple[tuple[str, ...], ...]:
        """The axes of the messages in which the lane travels alone in a step.

        One over all that loop together, at the start of backward, unless the hook's own messages bring the lane there; and one
        behind the hook where it leaves different gradients on the ranks that take one step.
        """
        axes, equal = self.reduced(step)
        if axes == self.agree:
            return () if equal else (axes,)
        return (self.agree,) if equal or not axes else (self.agree, axes)

    def carries(self, step: int) -> bool:
        """Whether the hook's own messages bring the lane to all ranks that loop together."""
        axes, equal = self.reduced(step)
        return equal and axes == self.agree


def make_plan(what: Pipeline | Transform, mesh_axes: Collection[str], on_buffers: Transform | None = None) -> Plan:
    """The plan of a pipeline, or of a hook alone.

    Args:
        what: The pipeline.
        mesh_axes: The names of the axes that are bound where it runs.
        on_buffers: The transform of the buffers, if there is one.
    """
    hook, after = (what.hook, what.after) if isinstance(what, Pipeline) else (what, None)
    mesh_axes = tuple(mesh_axes)
    reach = axes_of(hook, mesh_axes)
    union = reach.union(*(axes_of(part, mesh_axes) for part in (after, on_buffers) if part is not None))
    agree = (*(name for name in mesh_axes if name in union), *sorted(union - set(mesh_axes))) or mesh_axes
    parts = stages(hook)
    first = parts[0] if parts else None
    # Where a later stage communicates too, only the last one knows the sums over all ranks.
    alone = first is not None and first.reduction is not None and reach <= set(names(first.reduction.axis))
    always = None if any(_holds(hook, name) for name in _BY_STEP) else _reduced(hook, mesh_axes, 0)
    plan = Plan(hook, mesh_axes, agree, always)
    if first is not None and first.plain and alone and not any(part.sums for part in parts[1:]):
        if len(parts) == 2 and parts[1].spec.name == "clip_by_global_norm":
            return plan._replace(reduce=first, clip=parts[1])
        return plan._replace(reduce=first, rest=tuple(parts[1:]))
    whole = next((i for i, part in enumerate(parts) if part.scope == "tree"), len(parts))
    return plan._replace(early=chain(*parts[:whole]) if whole else None, rest=tuple(parts[whole:]))


def _reduced(hook: Transform, mesh_axes: tuple[str, ...], step: int) -> Reduced:
    reach = axes_of(hook, mesh_axes, step)
    axes = tuple(name for name in mesh_axes if name in reach)
    return Reduced(axes, bool(axes) and hook.sums is not None and _summed_over(hook, mesh_axes, step) >= set(axes))


def starts(part: Any) -> list[int]:
    """The steps from which on a transform does other things than before, 0 included; of those in it that run now and then, the first."""
    found = {0}
    for child in part.spec.children:
        if isinstance(child, Transform):
            found |= {start for start in starts(child)}
    if part.spec.name == "switch_after":
        at = part.spec["step"]
        found = {0, at, *(start for start in starts(part.spec["before"]) if start < at)}
        found |= {at + start for start in starts(part.spec["after"])}
    if part.spec.name == "every":
        found = {0, part.spec["steps"] - 1, *(start * part.spec["steps"] for start in found)}
    return sorted(found)


def axes_of(part: Transform, mesh_axes: Collection[str], step: int | None = None) -> set[str]:
    """The axes that a transform may communicate over: those in its arguments; all, where a function may do anything.

    Args:
        step: Only in this step, counted from 0; None: in any.
    """
    if not part.spec.name or "function" in dict(part.spec.args):
        return set(mesh_axes)
    found = set[str]()
    ours = str(getattr(_FACTORIES.get(part.spec.name), "__module__", "")).startswith(_OURS)
    for argument, value in part.spec.args:
        for name in value if isinstance(value, tuple) else (value,):
            # Of others' factories any argument may name one.
            if isinstance(name, str) and (argument in AXES or (name in mesh_axes and not ours)):
                found.add(name)
    return found.union(*(axes_of(child, mesh_axes, at) for child, at in _running(part, step)))


def _running(part: Transform, step: int | None) -> list[tuple[Transform, int | None]]:
    """The transforms that run inside one in a step, each with its own number of that step."""
    if step is not None and part.spec.name == "switch_after":
        start = part.spec["step"]
        return [(part.spec["before"], step)] if step < start else [(part.spec["after"], step - start)]
    if step is not None and part.spec.name == "every":
        steps = part.spec["steps"]
        return [] if (step + 1) % steps else [(part.spec["transform"], step // steps)]
    return [(child, step) for child in part.spec.children if isinstance(child, Transform)]


def _summed_over(part: Transform, mesh_axes: Collection[str], step: int | None) -> set[str]:
    """The axes over which a transform makes all gradients equal, and its sums are sums."""
    if part.sums is None or part.spec.name == "masked":
        return set()
    inside = [_summed_over(child, mesh_axes, at) for child, at in _running(part, step)]
    if part.spec.name == "chain":
        return set[str]().union(*inside)
    return set.intersection(*inside) if inside else axes_of(part, mesh_axes, step)


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


def takes_flat(part: Transform) -> bool:
    """Whether a transform may be given a bucket as one flat tensor: not where something in it looks at paths."""
    return part.scope in ("element", "message") and not part.named
