"""A step on trees: the memory of a pure pipeline."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..axes import psum
from ..base import (
    Call,
    State,
    Summed,
    Transform,
    Tree,
    all_finite,
    check_weight,
    map_with_path,
    path_string,
    share_of,
    to_device,
    with_changes,
)
from ..codecs import Codec
from ..layout import Pieces, bind_pieces
from ..optimizers import Optimizer, masters_of, state_fields, step as step_tree, with_masters, with_state_fields
from ._pipeline import NAME as RATES, Rates, are_apart, check_sum, mark_of, number_of, rates_of
from ._program import Agree, Effect, Ends, Gather, Judge, Stages, flag
from ._sharded import Sharding


class PipelineState(NamedTuple):
    hook: State
    optimizer: State  # the tree of the parameters with an optimizer state at every leaf
    after: State
    on_state: State
    step: int  # steps so far, skipped ones included, on the host; periods count by it
    window: Summed[Tensor]  # this rank's weights in the calls of `accumulate` since the last step, 0-d float64
    gather: State = ()  # of a sharded pipeline


class Owner(NamedTuple):
    """The parts of a pipeline."""

    hook: Transform
    optimizer: Optimizer
    after: Transform | None
    on_state: Transform | None
    codec: Codec | None
    sharding: Sharding | None
    skips: bool  # whether it skips steps whose gradients are not finite


class TreeMemory:
    """The trees of one step, from which the next ones are made.

    Attributes:
        params: The parameters: the given ones, then those after the step.
        state: Likewise the state.
        held: The parameters that this rank steps.
    """

    def __init__(self, owner: Owner, params: Tree, old: PipelineState, pieces: Pieces | None, call: Call) -> None:
        self._owner, self._old, self._pieces, self._call = owner, old, pieces, call
        self.params, self.state = params, old
        sharding = owner.sharding
        self.held = sharding.held(pieces, params, old.gather) if sharding and pieces else params
        self._agreed, self._fine = check_weight(call.weight), torch.ones((), dtype=torch.bool)
        self._grads: Tree = None
        self._hook_state: State = None
        self._rates: Rates = ()

    def begin(self, grads: Tree, compares: bool) -> None:
        """Take the gradients.

        Args:
            compares: Whether ranks may compare their pipelines, in the first step.
        """
        owner, old = self._owner, self._old
        self._grads = grads
        self._rates = rates_of(owner.optimizer, self.held, old.optimizer)
        if old.step == 0 and compares:
            mark = mark_of(owner.hook, owner.optimizer, owner.after, owner.on_state, owner.codec)
            self._rates = [*mark, *self._rates]

    def stages(self, op: Stages) -> bool:
        """Run the hook. The record rides in the lane."""
        lane = {**(self._call.lane or {}), "weight": self._agreed}
        if op.partial:
            self._grads = optree.tree_map(share_of(self._call.weight, "weight").masked, self._grads)
        if self._rates:
            lane[RATES] = number_of(self._rates)
        with bind_pieces(self._pieces):
            self._grads, self._hook_state = self._owner.hook.run(
                self._grads, self._old.hook, self.params, self._call.inside(lane=lane)
            )
        self._agreed = self._old.window + self._agreed
        if self._grads is None:
            self.state = with_changes(self._old, hook=self._hook_state, window=self._agreed)
        return self._grads is not None

    def observe(self) -> None:
        if self._owner.skips:
            self._fine = all_finite(self._grads)

    def agree(self, op: Agree) -> None:
        number = None
        if op.moment == "pieces":
            self._fine = psum((~self._fine).to(torch.float64), op.axes) == 0
        elif op.rides:
            assert self._owner.hook.sums is not None
            sums = self._owner.hook.sums(self._hook_state).lane
            self._agreed, number = sums["weight"], sums.get(RATES)
        else:
            words = [to_device(self._fine.device, self._agreed), (~self._fine).to(self._agreed.dtype)]
            if self._rates:
                words.append(self._agreed.new_full((), number_of(self._rates)).to(self._fine.device))
            self._agreed, bad, *numbers = psum(torch.stack(words), op.axes)
            self._fine, number = bad == 0, numbers[0] if numbers else None
        if number is not None:
            check_sum(self._rates, number, op.axes, self._old.step)

    def judge(self, op: Judge) -> Effect:
        return Effect(flag(self._agreed > 0), flag(self._fine))

    def step(self, effect: Effect) -> None:
        optimizer, slots = self._owner.optimizer, self._old.optimizer
        new = self.held, slots
        if self._call.donated and self._pieces is None and effect.steps is not False and are_apart(self.held):
            bad = (~effect.steps).to(torch.float32) if isinstance(effect.steps, Tensor) else None
            new = step_tree(optimizer, self.held, self._grads, slots, True, bad)
        elif effect.steps is not False:
            new = effect.where(optimizer.step(self.held, self._grads, slots), new)
        self._take(*new)

    def _take(self, held: Tree, slots: State) -> None:
        self.held, self.state = held, with_changes(self.state, optimizer=slots)
        if self._pieces is None:
            self.params = held

    def ends(self, op: Ends, effect: Effect) -> None:
        slots, call = self.state.optimizer, self._call.inside(weight=self._agreed, lane=None, donated=False)
        call = call if self._pieces is None else call.inside(sharded_over=self._pieces.axis)
        # Not `op.part`, which is the same: in a compiled step the program is a constant, whose objects are not traced.
        after, on_state = self._owner.after, self._owner.on_state
        if op.on == "params" and after is not None:
            masters, state = effect.after(after, masters_of(self.held, slots), self.state.after, call)
            self._take(*with_masters(masters, self.held, slots))
            self.state = with_changes(self.state, after=state)
            return
        assert on_state is not None
        named = by_path(self.held, slots)
        fields, state = effect.after(on_state, state_fields(named), self.state.on_state, call, self.held)
        replaced = with_state_fields(named, fields)
        self._take(self.held, map_with_path(lambda path, _: replaced[path], self.held))
        self.state = with_changes(self.state, on_state=state)

    def gather(self, op: Gather, effect: Effect) -> None:
        sharding, pieces = self._owner.sharding, self._pieces
        if sharding is None or pieces is None:
            return
        new, found = sharding.gather(pieces, self.params, self.held, self.state.optimizer, self.state.gather)
        self.params = new if self._owner.codec is None else effect.where(new, self.params)
        self.state = with_changes(self.state, gather=found)

    def keep(self, effect: Effect) -> None:
        self.state = with_changes(
            self.state,
            hook=effect.keep(self._hook_state, self._old.hook),
            step=self._old.step + 1,
            window=torch.zeros_like(self._agreed),
        )


def by_path(params: Tree, slots: State) -> dict[str, Any]:
    """Path -> optimizer state."""
    paths, _, structure = optree.tree_flatten_with_path(params)
    return dict(zip(map(path_string, paths), structure.flatten_up_to(slots), strict=True))
