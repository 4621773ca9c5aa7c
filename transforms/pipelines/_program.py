"""A step as operations, their executor, and the effect of a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..base import Call, State, Transform, Tree, check_weight, choose_state, readable_without_sync, to_device, where
from ..combinators import stages
from ._plan import Plan

# A bool where the host knows it, a 0-d bool tensor otherwise.
Flag: TypeAlias = "bool | Tensor"


class Effect(NamedTuple):
    """The effect of a step on this rank.

    live: at least one of the ranks that share the gradients has weight.
    fine: the gradients may be used.
    raises: a flag of the device: the host will raise for this step later, so nothing may change.
    """

    live: Flag
    fine: Flag = True
    raises: Flag = False

    @property
    def steps(self) -> Flag:
        """Whether the optimizer takes a step."""
        return both(self.live, self.fine)

    @property
    def at_end(self) -> Effect:
        """The effect for transforms at the end of the step, which run although the optimizer took none."""
        return Effect(True if self.raises is False else ~torch.as_tensor(self.raises))

    def keep(self, new: Any, old: Any) -> Any:
        """The state after the step, or the state before it with advanced host counters.

        Each argument may be a function that returns the state; see `choose_state`.
        """
        if self.steps is True:
            return new() if callable(new) else new
        return choose_state(torch.as_tensor(self.steps), new, old)

    def where(self, new: Tree, old: Tree) -> Tree:
        """The tensors after the step, or the tensors before it, leaf by leaf."""
        if isinstance(self.steps, Tensor):
            return where(self.steps, new, old)
        return new if self.steps else old

    def update_counters(self, skips: Any, outer: Any) -> Any:
        """The state around a pipeline that skips steps, after this step: it counts the step, unless no rank had input."""
        if self.live is False:
            return outer
        counted = skips.update_counters(outer, torch.as_tensor(self.fine))
        return counted if self.live is True else choose_state(self.live, counted, outer)

    def weight(self, weight: Any) -> Any:
        """The weight of this step in an average over steps: 0 for a step without effect."""
        if isinstance(self.steps, Tensor):
            weight = to_device(self.steps.device, check_weight(weight))
            return torch.where(self.steps, weight, torch.zeros_like(weight))
        return weight if self.steps else 0.0

    def after(
        self, transform: Transform, values: Tree, state: State, call: Call, params: Tree = None
    ) -> tuple[Tree, State]:
        """Transform the parameters, the buffers, or the optimizer's state, at the end of each step, those without effect
        included.

        Args:
            call: The call, with the weight of this step and the number of the steps before it.
            params: The parameters, where `values` are others.
        """
        at_end = call.inside(weight=self.weight(call.weight), persistent=True)
        run = partial(transform.run, values, state, values if params is None else params, at_end)
        if self.raises is False:
            return run()
        return choose_state(~torch.as_tensor(self.raises), run, (values, state))


FLUSH = Effect(False)  # of a flush, in which no step is taken; recognised by identity


def both(a: Flag, b: Flag) -> Flag:
    if a is False or b is False:
        return False
    if a is True or b is True:
        return b if a is True else a
    return a & b


def inverse(a: Flag) -> Flag:
    """Flags are joined by & and |; ~ would make a number of a bool."""
    return not a if isinstance(a, bool) else ~a


def flag(condition: Tensor) -> Flag:
    """A bool where Python can read the tensor without waiting for a device, the tensor otherwise."""
    return bool(condition) if readable_without_sync(condition) else condition


@dataclass(frozen=True)
class Stages:
    """Starts the stages of the hook on the gradients; `Observe` waits for their last messages.

    Where an `Agree` of the step `rides`, the record travels in these messages.

    partial: whether they leave some gradients as each rank's own, although ranks step together, as `masked(mean(...))` does. A rank
        without weight then gives zeros.
    """

    parts: tuple[Transform, ...]
    partial: bool = False


@dataclass(frozen=True)
class Observe:
    """Waits for the messages of the hook, and looks at the gradients: whether they are finite, and their norm."""


@dataclass(frozen=True)
class Agree:
    """The ranks of some axes agree on numbers, by the sum of a record of each of them.

    moment: "begin": weights, loss, the user's sums, what is known before the gradients. "share": weights, for a mean over
        other axes. "verdict": whether the gradients after the hook are finite, their norm, and where nothing needs it earlier
        what "begin" has. "pieces": a verdict of pieces, over the axis that shards. "used": the parameters that some rank has used.
    rides: whether it travels in the messages of the hook; otherwise in one of its own.
    late: whether it may be read in the next step, if nothing in this one needs it.
    """

    moment: Literal["begin", "share", "verdict", "pieces", "used"]
    axes: tuple[str, ...]
    rides: bool = False
    late: bool = False


@dataclass(frozen=True)
class Judge:
    """Decides on the effect of the step, from what has been agreed on."""


@dataclass(frozen=True)
class Step:
    """Runs the optimizer on what this rank steps."""


@dataclass(frozen=True)
class Ends:
    """Runs a transform of the parameters, of the optimizer's state or of the buffers at the end of the step."""

    part: Transform
    on: Literal["params", "optimizer", "buffers"]


@dataclass(frozen=True)
class Gather:
    """Gives all ranks of an axis the parameters that each has stepped.

    ended: whether a transform at the end of the step may have changed them in a step without effect too.
    """

    axis: str
    ended: bool = False


@dataclass(frozen=True)
class Keep:
    """Takes the new states, or keeps the old ones with advanced counters."""


Op: TypeAlias = Stages | Observe | Agree | Judge | Step | Ends | Gather | Keep
Program: TypeAlias = tuple[Op, ...]


# Where a step runs: on the flat buckets of a train_step, or in a registered module's buckets.
Place = Literal["buckets", "module"]


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
    axes, equal, _ = plan.reduced(step)
    hook = Stages(tuple(stages(plan.hook)), partial=bool(axes) and not equal)
    early, late = agreements(plan, parts, step, place)
    if not parts.steps:
        return (*early, hook, Observe(), *late, Keep())
    return (*early, hook, Observe(), *late, Judge(), Step(), *parts.ends, Keep())


def agreements(plan: Plan, parts: Parts, step: int, place: Place) -> tuple[tuple[Agree, ...], tuple[Agree, ...]]:
    """What the ranks agree on before the messages of the hook, and with or after them.

    Where ranks loop together all of them must know of each other in every step. The record of a plain reduction rides in its
    messages; for other hooks it goes before them, since their means need the sum of the weights. Where the hook leaves
    different gradients, the ranks that step together need a verdict after it, in which the record rides if nobody needs it
    earlier.
    """
    axes, equal, shares = plan.reduced(step)
    together = plan.agree
    early: list[Agree] = []
    late: list[Agree] = []
    plain = plan.reduce is not None
    if plain and equal and place == "buckets":
        late.append(Agree("begin", axes, rides=True))
    elif plain or equal or shares:  # torch's buckets have no room for a record
        early.append(Agree("begin", axes))
    early += [Agree("share", one) for one in shares if not plain and one != axes]
    if parts.used:
        late.append(Agree("used", parts.used))
    if not parts.steps:
        return tuple(early), tuple(late)
    if axes != together and not (place == "module" and parts.skips):
        early.append(Agree("begin", together, late=True))
    if plan.hook.sharded_over is not None:
        late.append(Agree("pieces", (plan.hook.sharded_over,)))
    if not equal:
        late.append(Agree("verdict", axes))
    return tuple(early), tuple(late)


class Memory(Protocol):
    """Carries out the operations of a program: on trees, on flat buckets, on a module's buckets, or without data."""

    def stages(self, op: Stages) -> bool:
        """Run the hook; returns whether there are gradients to step with: not within a window of several calls."""

    def observe(self) -> None:
        """Wait for the hook's messages, and look at the gradients."""

    def agree(self, op: Agree) -> None:
        """Agree with other ranks, or read what the hook's messages have carried."""

    def judge(self, op: Judge) -> Effect:
        """The effect of the step."""

    def step(self, effect: Effect) -> None:
        """Run the optimizer."""

    def ends(self, op: Ends, effect: Effect) -> None:
        """Run a transform at the end of the step."""

    def gather(self, op: Gather, effect: Effect) -> None:
        """Gather the parameters, where they have been changed."""

    def keep(self, effect: Effect) -> None:
        """Take or keep the states."""


def execute(program: Program, memory: Memory, effect: Effect | None = None) -> Effect | None:
    """Run a program.

    Args:
        effect: The effect, for a program without `Judge`.

    Returns:
        The effect; None where a window of several calls goes on.
    """
    for op in program:
        if isinstance(op, Stages):
            if not memory.stages(op):
                return None
        elif isinstance(op, Observe):
            memory.observe()
        elif isinstance(op, Agree):
            memory.agree(op)
        elif isinstance(op, Judge):
            effect = memory.judge(op)
        else:
            assert effect is not None
            if isinstance(op, Step):
                memory.step(effect)
            elif isinstance(op, Ends):
                memory.ends(op, effect)
            elif isinstance(op, Gather):
                found = effect.at_end if op.ended else effect
                if found.steps is not False:
                    memory.gather(op, found)
            elif isinstance(op, Keep):
                memory.keep(effect)
    return effect
