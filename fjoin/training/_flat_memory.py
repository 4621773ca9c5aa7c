"""A step on flat buckets: the memory of a `train_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..agreement import StepRecord, Sums
from ..buckets import BucketQueue, GradBuffer, gather_changes_, start_gather
from ..step import Decision, StateData, run_end, step_buckets
from ..transforms.axes import Work, bind_axes
from ..transforms.base import Call
from ..transforms.pipelines import FLUSH, Agree, Effect, Ends, Gather, Judge, Stages

if TYPE_CHECKING:
    from ._run import Run


def tears(step: int) -> str:
    """The text of a state whose step fails while it changes the parameters."""
    return (
        f"step {step} failed after it had changed some of the parameters, so this state is neither old nor "
        f"new; load a checkpoint, or use donate=False to keep the old state whole"
    )


class FlatMemory:
    """One call of a step on the flat buckets of a state.

    Attributes:
        sums: The record, summed over the ranks that share the gradients, once it is known.
        of_all: Waits for the record, summed over all ranks that loop together.

    Args:
        weight: This rank's weight, for the transform of its buffers.
        buffers: The buffers after the forward pass.
    """

    def __init__(self, shell: Run, body: StateData, weight: float, buffers: dict[str, Tensor] | None) -> None:
        self._shell, self._body, self._weight, self._buffers = shell, body, weight, buffers
        self.sums: dict[str, Any] | None = None
        self._counts: Sums | None = None
        self._begun: dict[tuple[str, ...], Sums] = {}  # by axes, the records that are sent before the gradients
        self._divisor: Any = 1.0
        self._decision = Decision(FLUSH)
        self._gathers: list[Work] = []  # of parameters, under way

    def begin(
        self,
        queue: BucketQueue,
        backward: Callable[[], None],
        record: StepRecord,
        values: dict[str, Any],
        counts: dict[str, Any],
    ) -> None:
        """Give this memory a whole step. A flush does not call it: only the operations behind the optimizer run then.

        Args:
            backward: Runs the backward pass.
            record: The record of the ranks that share the gradients.
            values: This rank's values in it.
            counts: This rank's values in the record of all ranks that loop together.
        """
        self._queue, self._backward, self._record, self._values = queue, backward, record, values
        self._own_counts = counts

    @property
    def measured(self) -> dict[str, Any]:
        """Numbers of the step that are known by the way: norms, and the counters of steps that are left out."""
        norm, outer = self._decision.norm, self._body.outer
        found: dict[str, Any] = {**self._shell.recorded_norms(self._body.hook, self._body.ends.after)}
        if norm is not None:
            found["grad_norm"] = norm
        if self._shell.pipeline.skips is not None:
            found["skipped"] = outer.skipped
            if self._shell.pipeline.skips.scaled:
                found["loss_scale"] = outer.scale
        return found

    @property
    def of_all(self) -> Callable[[], dict[str, Any]]:
        """A function that waits for the record of all ranks that loop together, and returns it."""
        sums, counts, on_device = self.sums, self._counts, self._shell.agreements.check.grads.on_device
        assert sums is not None
        return (lambda: sums) if counts is None else lambda: counts.read(on_device)

    def stages(self, op: Stages) -> bool:
        """Run the backward pass, with the messages of full buckets under way."""
        body, hook, storage = self._body, self._shell.hook, self._body.storage
        self._queue.start(storage)
        agreements = self._shell.agreements
        if agreements.plan.reduce is None:
            agreements.check.grads.begin(agreements.plan, body.step)
        hook.start(body.hook, storage, self._record, self._values, body.step, self._begun, body.first)
        self._backward()
        self._queue.finish()
        return True

    def observe(self) -> None:
        body, outgoing = self._body, self._queue.outgoing
        self.sums, self._divisor = self._shell.hook.finish(body.hook, body.storage, outgoing)

    def agree(self, op: Agree) -> None:
        shell, outgoing = self._shell, self._queue.outgoing
        if op.moment == "pieces":
            shell.agreements.check.grads.share(outgoing, shell.mesh.axes[op.axes[0]])
        elif op.moment == "verdict":
            self.sums = shell.agreements.check.grads.verdict(outgoing, self._record, self._values)
        elif op.late:
            self._counts = shell.agreements.send(self._own_counts)
        elif not op.rides:
            self._begun[op.axes] = shell.agreements.record(op.axes).send(self._values)

    def judge(self, op: Judge) -> Effect:
        """Decide whether this step may change anything.

        Raises:
            NonFinite, DesyncError: on all ranks; the state is as before.
        """
        shell, body, outgoing = self._shell, self._body, self._queue.outgoing
        assert self.sums is not None
        counts = None if self._counts is None else shell.agreements.read(body.step, self._counts)
        check = shell.agreements.check
        self._decision = check.decide(body.step, self.sums, outgoing, self._divisor, shell.hook.clip, counts)
        self._raise_or_count()
        return self._decision.effect

    def _raise_or_count(self) -> None:
        body, decision, skips = self._body, self._decision, self._shell.pipeline.skips
        if not decision.changes:
            body.buffers = body.buffers_before
        if decision.error is not None and skips is None:
            body.lose_window(body.calls + 1)  # a window that ends in this error is lost as a whole
            raise decision.error
        if skips is not None:
            body.outer = decision.effect.update_counters(skips, body.outer)
        body.torn = tears(body.step)

    def _step_buckets(self, outgoing: Iterable[tuple[int, GradBuffer]]) -> None:
        """Run the optimizer's kernels on buckets, and begin their gathers."""
        shell, storage, guards = self._shell, self._body.storage, self._decision
        for index in step_buckets(storage, outgoing, guards.divisor, guards.found_inf):
            # Fused kernels do not increment the version: without this a graph that still needs the old values,
            # such as the user's own, would silently use the new ones.
            torch.autograd.graph.increment_version(storage.flats[index])
            if shell.gathers_buckets:
                self._start_gather(index)

    def step(self, effect: Effect) -> None:
        if self._decision.changes:  # in the order of the forward pass, in which the parameters are gathered
            self._step_buckets(reversed(list(enumerate(self._queue.outgoing))))

    def ends(self, op: Ends, effect: Effect) -> None:
        shell, body, storage = self._shell, self._body, self._body.storage
        if op.on == "buffers":
            self._end_on_buffers(op, effect)
            return
        call = self._call(0.0 if self.sums is None else self.sums["weight"], effect)
        axis = None if storage.pieces is None else storage.pieces.axis
        call = call.inside(sharded_over=axis)
        states: Mapping[str, Any] = {}
        if storage.has_masters or op.on == "optimizer":
            states = storage.optimizer_states()
        lent = [*storage.flats, *storage.exact]
        body.ends = run_end(op, body.ends, shell.mesh, storage.own_leaves(), states, lent, effect, call)

    def _end_on_buffers(self, op: Ends, effect: Effect) -> None:
        body = self._body
        if body.buffers is None:
            return
        self._take_buffers(effect)
        with torch.no_grad(), bind_axes(self._shell.mesh.axes):
            body.buffers, body.buffers_state = effect.after(
                op.part, body.buffers, body.buffers_state, self._call(self._weight, effect)
            )

    def _take_buffers(self, effect: Effect) -> None:
        """Take the buffers of the forward pass, or keep those before it; a flush has none."""
        if self._buffers is not None:
            self._body.buffers = effect.keep(self._buffers, self._body.buffers_before)

    def _call(self, weight: Any, effect: Effect) -> Call:
        return Call(weight, self._body.step).inside(flush=effect is FLUSH)

    def gather(self, op: Gather, effect: Effect) -> None:
        shell, storage = self._shell, self._body.storage
        sharding = shell.pipeline.sharding
        if sharding is None:
            return
        if sharding.codec is not None:
            with torch.no_grad():
                self._body.gather = gather_changes_(storage, sharding, shell.mesh, self._body.gather, effect)
            return
        if not shell.gathers_buckets:
            with torch.no_grad():
                for k in reversed(range(len(storage.layout))):
                    self._start_gather(k)
        for work in self._gathers:
            work.wait()

    def _start_gather(self, index: int) -> None:
        work = start_gather(self._body.storage, index, self._shell.mesh)
        if work is not None:
            self._gathers.append(work)

    def keep(self, effect: Effect) -> None:
        body = self._body
        if self._shell.on_buffers is None:
            self._take_buffers(effect)
        if self.sums is not None:
            body.hook = effect.keep(partial(self._shell.hook.new_state, self._queue.outgoing), body.hook)
            self._queue.free()
        body.torn = ""
