"""The program of a step: what a pipeline does in it, in order, as data."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..combinators._chain import stages
from ..plan._plan import Plan
from ..transform._transform import Transform
from ._ops import Agree, Ends, Gather, Judge, Keep, Observe, Op, Program, Stages, Step

# Where a step runs: on trees, on the flat buckets of a train_step, in a registered module's buckets.
Place = Literal["tree", "buckets", "module"]


class Parts(NamedTuple):
    """The parts of a pipeline that its program depends on."""

    after: Transform | None = None
    on_state: Transform | None = None
    shards: str | None = None  # the axis over which its hook shards
    skips: bool = False  # whether it skips steps that are not finite
    on_buffers: Transform | None = None  # the transform of the buffers, in a train_step
    used: tuple[
        str, ...
    ] = ()  # the axes over which ranks agree on the parameters in use, where a pass need not use all
    steps: bool = True  # whether there is an optimizer, and not the hook alone

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms at the end of a step."""
        return tuple(part for part in (self.after, self.on_state, self.on_buffers) if part is not None)

    @property
    def ends(self) -> Program:
        """The operations behind the optimizer, which a flush runs too."""
        ops: list[Op] = []
        if self.after is not None:
            ops.append(Ends(self.after, "params"))
        if self.on_state is not None:
            ops.append(Ends(self.on_state, "optimizer"))
        if self.shards is not None:
            ops.append(Gather(self.shards, ended=self.after is not None))
        if self.on_buffers is not None:
            ops.append(Ends(self.on_buffers, "buffers"))
        return tuple(ops)


class Programs:
    """The programs of the steps of one pipeline: one for all steps, where its messages are the same in each."""

    plan: Plan
    parts: Parts

    def __init__(self, plan: Plan, parts: Parts, place: Place) -> None:
        self.plan, self.parts, self.place = plan, parts, place
        self._known: Program | None = None

    def of(self, step: int) -> Program:
        """The program of a step; see `program`."""
        if self.plan.always is None:
            return program(self.plan, self.parts, step, self.place)
        if self._known is None:
            self._known = program(self.plan, self.parts, 0, self.place)
        return self._known

    def is_apart(self, step: int) -> bool:
        """Whether in a step the ranks that loop together agree in a message of their own, since the hook leaves some out."""
        return any(op.late for op in agreements(self.plan, self.parts, step, self.place)[0])


def program(plan: Plan, parts: Parts, step: int, place: Place) -> Program:
    """The program of a step.

    Args:
        step: The number of the step, from 0. Steps that send the same messages have equal programs.
    """
    axes, equal = plan.reduced(step)
    hook = Stages(tuple(stages(plan.hook)), partial=bool(axes) and not equal)
    early, late = agreements(plan, parts, step, place)
    if not parts.steps:
        return (*early, hook, Observe(), *late, Keep())
    return (*early, hook, Observe(), *late, Judge(), Step(), *parts.ends, Keep())


def agreements(plan: Plan, parts: Parts, step: int, place: Place) -> tuple[tuple[Agree, ...], tuple[Agree, ...]]:
    """What the ranks agree on before the messages of the hook, and with or after them.

    Where ranks loop together, in a train_step or a module, all of them must know of each other in every step. A hook that
    makes gradients equal on all of them carries the record; otherwise it goes alone. Where the hook leaves different
    gradients, the ranks that step together need a verdict after it, in which the record rides if nobody needs it earlier.
    """
    axes, equal = plan.reduced(step)
    together = plan.agree
    early: list[Agree] = []
    late: list[Agree] = []
    if place == "module" and plan.reduce is not None:  # torch's buckets have no room for a record
        early.append(Agree("begin", axes))
    elif equal and parts.steps:
        late.append(Agree("begin", axes, rides=True))
    if parts.used:
        late.append(Agree("used", parts.used))
    if not parts.steps:
        return tuple(early), tuple(late)
    if place != "tree" and axes != together and not (place == "module" and parts.skips):
        early.append(Agree("begin", together, late=True))
    if plan.hook.sharded_over is not None and (place != "tree" or (parts.skips and equal)):
        late.append(Agree("pieces", (plan.hook.sharded_over,)))
    if not equal and (axes or place != "tree"):  # without axes each rank decides for itself
        late.append(Agree("verdict", axes))
    return tuple(early), tuple(late)
