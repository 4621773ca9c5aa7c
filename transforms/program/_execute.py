"""The executor of programs."""

from __future__ import annotations

from typing import Protocol

from ._effect import Effect
from ._ops import Agree, Ends, Gather, Judge, Keep, Observe, Program, Stages, Step


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
