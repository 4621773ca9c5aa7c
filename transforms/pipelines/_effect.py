"""The effect of a step: what changes where no rank has weight, or gradients are not finite."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..base import Call, State, Transform, Tree, check_weight, choose_state, readable_without_sync, to_device, where

# A bool where the host knows it, a 0-d bool tensor otherwise.
Flag: TypeAlias = "bool | Tensor"


class Effect:
    """The effect of a step on this rank.

    Attributes:
        live: At least one of the ranks that share the gradients has weight.
        fine: The gradients may be used.
        raises: A flag of the device: the host will raise for this step later, so nothing may change.
        steps: Whether the optimizer takes a step.
    """

    __slots__ = ("fine", "live", "raises", "steps")

    def __init__(self, live: Flag, fine: Flag = True, raises: Flag = False) -> None:
        self.live, self.fine, self.raises = live, fine, raises
        if live is False or fine is False:
            self.steps: Flag = False
        else:
            self.steps = fine if live is True else live if fine is True else live & fine

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


def inverse(a: Flag) -> Flag:
    """Flags are joined by & and |; ~ would make a number of a bool."""
    return not a if isinstance(a, bool) else ~a


def flag(condition: Tensor) -> Flag:
    """A bool where Python can read the tensor without waiting for a device, the tensor otherwise."""
    return bool(condition) if readable_without_sync(condition) else condition
