"""How a pipeline runs, read off its spec."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ..axes import names
from ..base import Needs, Over, Transform, timings
from ..combinators import chain, stages


class StepReduction(NamedTuple):
    """The reduction of a hook in one step.

    axes: the axes over which it reduces: their ranks take or skip a step together. Empty where it sends nothing.
    equal: whether its own messages make the gradients equal on all of these ranks.
    shares: the axes over which ranks sum their weights, for the means in it.
    counts: how the reductions that gradients reach first count ranks: by "weight", or each "live" one as 1.
    before: the stages that change gradients before these.
    """

    axes: tuple[str, ...]
    equal: bool
    shares: tuple[tuple[str, ...], ...] = ()
    counts: frozenset[str] = frozenset()
    before: tuple[Transform, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether the hook leaves some gradients as each rank's own, although ranks step together, as
        `masked(mean(...))` does.
        """
        return bool(self.axes) and not self.equal


class Parts(NamedTuple):
    """The parts of a pipeline on which it depends what its ranks sum beside gradients."""

    after: Transform | None = None
    on_state: Transform | None = None
    skips: bool = False  # whether it skips steps that are not finite
    on_buffers: Transform | None = None  # the transform of the buffers, in a train_step
    steps: bool = True  # whether there is an optimizer, and not the hook alone
    compares: bool = True  # whether it has hyperparameters that may differ between ranks, which they compare

    @property
    def ends(self) -> tuple[Transform, ...]:
        """The transforms at the end of a step."""
        return tuple(part for part in (self.after, self.on_state, self.on_buffers) if part is not None)


# Where a step runs: on the flat buckets of a train_step, or in a registered module's buckets.
StepPlace = Literal["buckets", "module"]


class SentRecords(NamedTuple):
    """What the ranks sum in a step beside their gradients.

    before: the axes of the records that go before the gradients, each in a message of its own: of the ranks that share
        gradients, and of those whose weights a mean in the hook needs.
    known: each rank knows it without a message.
    apart: whether a record of all ranks that loop together goes too, since the hook leaves some of them out. It is read
        in the next step, if nothing in this one needs it.
    pieces: the axis over which a verdict on pieces is summed after the hook, or None.
    verdict: whether the record goes after the hook, which leaves different gradients: with it goes whether they are
        finite.
    """

    before: tuple[tuple[str, ...], ...] = ()
    apart: bool = False
    pieces: str | None = None
    verdict: bool = False
    known: bool = False


class Plan(NamedTuple):
    """The way a whole pipeline runs. At most one of `reduce` and `early` is given.

    reduce: a fusable stage, `mean` or `sum_over`, that comes first, with no other reduction after it. Buckets are
        summed in place during backward, and the optimizer's kernel divides.
    early: the stages before the first one that needs the whole tree, as one transform. They run on each bucket during
        backward.
    clip: a stage that scales by the norm of all gradients, as `clip_by_global_norm`, and is the only one between
        `reduce` and the optimizer. It too becomes part of the kernel's scale.
    rest: the stages that run on the whole tree after these.
    loop_axes: the axes whose ranks loop together, in all steps: those of the hook and of the transforms at the end of a
        step.
    adds: whether gradients of several calls, each times its weight, are added before they are sent.
    over: how `reduce` counts ranks; None for a sum.
    """

    hook: Transform
    mesh_axes: tuple[str, ...]
    loop_axes: tuple[str, ...]
    always: StepReduction | None  # the reduction of the hook, where it is the same in all steps
    reduce: Transform | None = None
    early: Transform | None = None
    clip: Transform | None = None
    rest: tuple[Transform, ...] = ()
    adds: bool = False
    over: Over | None = None

    def counted(self, weight: float, step: int) -> float:
        """What a rank of this weight counts in the first reduction of a step."""
        reduced = self.always or self.reduced(step)  # without a call where all steps are alike
        return float(weight > 0) if reduced.counts == {"live"} and not self.adds else weight

    def total(self, sums: Mapping[str, Any], ranks: int) -> Any:
        """What to divide the sums of `reduce` by, from the sums over this number of ranks of their `weight` and `live`."""
        if self.over == "world":
            return float(ranks)
        return 1.0 if self.over is None else sums["live" if self.over == "live" else "weight"]

    def starts_from_weight(self, step: int, mixed: Collection[str]) -> bool:
        """Whether the backward pass of a loss must start from this rank's weight, since it mixes the losses of ranks of
        other weights.

        Args:
            mixed: The axes over which the loss has communicated.
        """
        return not set(self.reduced(step).axes).isdisjoint(mixed)

    def needs_equal_weights(self, step: int) -> str:
        """Why the ranks must have equal weights where such a loss has communicated, in words; "" where they need not."""
        before, counts = self.reduced(step).before, self.reduced(step).counts
        if "live" in counts and (self.adds or len(counts) > 1):
            return f"{self.hook!r} counts each rank as 1; take over='weight'"
        if before and "weight" in counts:
            return f"{before[0]!r} changes the gradients before they are reduced; put it behind the reduction"
        return ""

    def reduced(self, step: int) -> StepReduction:
        """The reduction of the hook in a step, counted from 0."""
        return self.always or _reduced(self.hook, self.mesh_axes, step)


def make_plan(
    hook: Transform, sizes: Mapping[str, int], *ends: Transform, adds: bool = False, clips: bool = True
) -> Plan:
    """The plan of a pipeline, or of a hook alone.

    Args:
        hook: The transform of the gradients.
        sizes: Axis name -> number of ranks, of the axes that are bound where it runs. Axes of one rank need no message.
        ends: The transforms of parameters, optimizer state and buffers at the end of a step.
        adds: Whether gradients of several calls, each times its weight, are added before they are sent. Then only a
            mean by these weights can be summed in place.
        clips: Whether the optimizer's kernel may clip. Then the gradients themselves are left as they were.
    """
    mesh_axes = tuple(name for name, size in sizes.items() if size > 1) or tuple(sizes)
    reach = axes_of(hook, sizes)
    union = reach.union(*(axes_of(part, sizes) for part in ends))
    loop_axes = (*(name for name in mesh_axes if name in union), *sorted(union - sizes.keys())) or mesh_axes
    parts = stages(hook)
    own = parts[0].facts.reduces if parts else None
    # If a later stage communicates too, only the last one knows the sums over all ranks.
    always = None if timings.changes_with_steps(hook) else _reduced(hook, mesh_axes, 0)
    plan = Plan(hook, mesh_axes, loop_axes, always, adds=adds)
    alone = own is not None and own.fusable and reach <= set(names(own.axis))
    if alone and not (adds and own and own.over in ("live", "world")) and not any(p.is_reducing for p in parts[1:]):
        plan = plan._replace(reduce=parts[0], over=own.over if own else None)
        if clips and len(parts) == 2 and parts[1].facts.by_norm is not None:
            return plan._replace(clip=parts[1])
        return plan._replace(rest=tuple(parts[1:]))
    whole = next((i for i, part in enumerate(parts) if Needs.TREE in part.needs), len(parts))
    return plan._replace(early=chain(*parts[:whole]) if whole else None, rest=tuple(parts[whole:]))


def records_of(plan: Plan, parts: Parts, step: int, place: StepPlace) -> SentRecords:
    """The records of a step, by its number.

    Where ranks loop together all of them must know of each other in every step. The record of a plain reduction travels
    in its messages; for other hooks it goes before them, since their means need the sum of the weights. torch's buckets
    have no room for it; in a module's mean over the world, where no hyperparameters are compared, there is nothing to
    say.
    """
    axes, equal, shares, *_ = plan.reduced(step)
    plain = plan.reduce is not None
    rides = plain and equal and place == "buckets"
    known = plain and equal and place == "module" and plan.over == "world" and not (parts.steps and parts.compares)
    before = [axes] if not (rides or known) and (plain or equal or shares) else []
    before += [one for one in shares if not plain and one != axes]
    if not parts.steps:
        return SentRecords(tuple(before), known=known)
    apart = axes != plan.loop_axes and not (place == "module" and parts.skips)
    return SentRecords(tuple(before), apart, plan.hook.sharded_over, not equal, known)


def _reduced(hook: Transform, mesh_axes: tuple[str, ...], step: int) -> StepReduction:
    reach = axes_of(hook, mesh_axes, step)
    axes = tuple(name for name in mesh_axes if name in reach)
    shares = dict.fromkeys(tuple(name for name in mesh_axes if name in one) for one in _shares(hook, step, frozenset()))
    equal = bool(axes) and timings.reduced_over(hook, step) >= set(axes)
    counts, before = _first_reductions(hook, step)
    return StepReduction(axes, equal, tuple(one for one in shares if one), counts, before)


def _first_reductions(part: Transform, step: int | None) -> tuple[frozenset[str], tuple[Transform, ...]]:
    """How the reductions that gradients reach first in a transform count ranks, and the stages that change gradients
    before.

    Without a reduction: none, and the stages that change gradients.
    """
    if part.facts.reduces is not None:
        return frozenset(["live" if part.facts.reduces.over in ("live", "world") else "weight"]), ()
    found = [_first_reductions(child, at) for child, at in timings.running(part, step)]
    reducing = [i for i, (counts, _) in enumerate(found) if counts]
    counts = frozenset[str]().union(*(found[i][0] for i in reducing))
    if reducing and part.facts.wraps == "stages":
        # Those before the last reduction, since the first may be of some leaves or axes only.
        counts, found = found[reducing[0]][0], found[: reducing[-1] + 1]
    else:
        found = [found[i] for i in reducing] or found
    before = tuple(one for _, some in found for one in some)
    changes = not part.spec.is_ours if counts else not (timings.children(part) or part.facts.wraps or part.facts.passes)
    return counts, (part, *before) if changes else before


def _shares(part: Transform, step: int | None, before: frozenset[str]) -> Iterator[frozenset[str]]:
    """The axes over which weights are summed for the means in a transform.

    Args:
        before: The axes that have been reduced over before.
    """
    if part.facts.reduces is not None:
        yield before.union(names(part.facts.reduces.axis))
        return
    for child, at in timings.running(part, step):
        yield from _shares(child, at, before)
        if part.facts.wraps == "stages":
            before = before | timings.reduced_over(child, at)


def axes_of(part: Transform, mesh_axes: Collection[str], step: int | None = None, at_end: bool = False) -> set[str]:
    """The axes over which a transform may communicate: those that it states, or all if it calls an unknown function.

    Args:
        step: Only in this step, counted from 0; None: in any step.
        at_end: Whether `part` runs on parameters, at the end of a step.
    """
    own = part.facts.equalizes if part.facts.reduces is None else part.facts.reduces.axis
    found = set(names(own)) if own is not None else set[str]()
    if not found and "function" in dict(part.spec.args):
        return set(mesh_axes)
    if not part.spec.is_ours:  # any argument may name an axis
        given = [each for _, value in part.spec.args for each in (value if isinstance(value, tuple) else (value,))]
        found.update(name for name in given if isinstance(name, str) and name in mesh_axes)
    return found.union(*(axes_of(child, mesh_axes, at, at_end) for child, at in timings.running(part, step, at_end)))


def takes_flat(part: Transform) -> bool:
    """Whether a transform may get a bucket as one flat tensor: if it needs no leaves, no paths and no whole tree."""
    return not part.needs & (Needs.LEAVES | Needs.PATHS | Needs.TREE)
