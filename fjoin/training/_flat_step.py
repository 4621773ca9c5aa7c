"""A step on flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..agreement import StepRecord, Sums
from ..buckets import BucketQueue, GradBuffer, gather_changes_, start_gather
from ..groups import Span
from ..step import Decision, Opened, StateData, run_end, step_buckets
from ..transforms.axes import Work, bind_axes
from ..transforms.base import Call, Transform
from ..transforms.pipelines import FLUSH, Effect, Sharding

if TYPE_CHECKING:
    from ._run import Run


def tears(step: int) -> str:
    """The text of a state whose step fails while it changes the parameters."""
    return (
        f"step {step} failed after it had changed some of the parameters, so this state is neither old nor "
        f"new; load a checkpoint, or use donate=False to keep the old state whole"
    )


class FlatStep:
    """One step on the flat buckets of a state: what comes between its forward pass and its metrics.

    Attributes:
        sums: The record, summed over the ranks that share the gradients, once it is known.

    Args:
        weight: This rank's weight, for the transform of its buffers.
        buffers: The buffers after the forward pass.
        span: Takes the names of the parts of the step, where somebody watches.
    """

    def __init__(
        self, shell: Run, body: StateData, weight: float, buffers: dict[str, Tensor] | None, span: Span | None = None
    ) -> None:
        self._shell, self._body, self._weight, self._buffers, self._span = shell, body, weight, buffers, span
        self.sums: dict[str, Any] | None = None
        self._counts: Sums | None = None  # the record of all ranks that loop together, where these are more
        self._decision = Decision(FLUSH)
        self._gathers: list[Work] = []  # of parameters, under way

    def run(
        self,
        queue: BucketQueue,
        backward: Callable[[], None],
        record: StepRecord,
        values: dict[str, Any],
        counts: dict[str, Any],
    ) -> None:
        """Run the backward pass, with the messages of full buckets under way, agree on its effect, and step.

        Args:
            backward: Runs the backward pass.
            record: The record of the ranks that share the gradients.
            values: This rank's values in it.
            counts: This rank's values in the record of all ranks that loop together.

        Raises:
            NonFinite, DesyncError: on all ranks; the state is as before.
        """
        shell, body, span, outgoing = self._shell, self._body, self._span, queue.outgoing
        agreements, reducer, storage, step = shell.agreements, shell.reducer, body.storage, body.step
        check, records = agreements.check, agreements.records(step)
        if span is not None:
            span.next("agree: begin")
        begun = {axes: agreements.record(axes).send(values) for axes in records.before}
        if records.apart:
            self._counts = agreements.send(counts)
        if span is not None:
            span.next("backward and launches")
        queue.start(storage, reducer.launch if span is None else shell.named_launch)
        if agreements.plan.reduce is None:
            check.grads.begin(agreements.plan, step)
        reducer.start(body.hook, Opened(storage, record, values, step, begun, body.first))
        backward()
        queue.finish()
        if span is not None:
            span.next("wait for gradients")
        self.sums, divisor = reducer.finish(body.hook, storage, outgoing)
        if span is not None:
            span.next("agree: verdict")
        if records.pieces is not None:
            check.grads.share(outgoing, shell.mesh.axes[records.pieces])
        if records.verdict:
            self.sums = check.grads.verdict(outgoing, record, values)
        assert self.sums is not None
        late = None if self._counts is None else agreements.read(step, self._counts)
        self._decision = decision = check.decide(step, self.sums, outgoing, divisor, reducer.clip, late)
        self._raise_or_count()
        if span is not None:
            span.next("optimizer")
        if decision.changes:  # in the order of the forward pass, in which the parameters are gathered
            self._step_buckets(reversed(list(enumerate(outgoing))))
        self.end(decision.effect)
        if span is not None:
            span.next("states")
        body.hook = decision.effect.keep(reducer.new_state, body.hook)
        queue.free()
        body.torn = ""

    def flush(self) -> None:
        """Run now the transforms that would run in later steps."""
        self.end(FLUSH)

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

    def end(self, effect: Effect) -> None:
        """Transform the parameters, the optimizer's state and the buffers at the end of a step, and gather the parameters."""
        shell, body = self._shell, self._body
        pipeline = shell.pipeline
        if pipeline.after is not None:
            self._transform(pipeline.after, "params", effect)
        if pipeline.on_state is not None:
            self._transform(pipeline.on_state, "optimizer", effect)
        if pipeline.sharding is not None:
            # A transform of the parameters may have changed them in a step without effect too.
            gathered = effect if pipeline.after is None else effect.at_end
            if gathered.steps is not False:
                if self._span is not None:
                    self._span.next("gather of parameters")
                self._gather(pipeline.sharding, gathered)
        if self._buffers is not None:
            body.buffers = effect.keep(self._buffers, body.buffers_before)
        if shell.on_buffers is not None and body.buffers is not None:
            self._name(shell.on_buffers, "buffers")
            with torch.no_grad(), bind_axes(shell.mesh.axes):
                call = self._call(self._weight, effect)
                body.buffers, body.buffers_state = effect.after(
                    shell.on_buffers, body.buffers, body.buffers_state, call
                )

    def _name(self, part: Transform, on: str) -> None:
        if self._span is not None:
            self._span.next(f"{part.spec.name or 'after'} of {on}")

    def _transform(self, part: Transform, on: Literal["params", "optimizer"], effect: Effect) -> None:
        shell, body, storage = self._shell, self._body, self._body.storage
        self._name(part, on)
        call = self._call(0.0 if self.sums is None else self.sums["weight"], effect)
        call = call.inside(sharded_over=None if storage.pieces is None else storage.pieces.axis)
        states: Mapping[str, Any] = {}
        if storage.has_masters or on == "optimizer":
            states = storage.optimizer_states()
        lent = [*storage.flats, *storage.exact]
        body.ends = run_end(part, on, body.ends, shell.mesh, storage.own_leaves(), states, lent, effect, call)

    def _call(self, weight: Any, effect: Effect) -> Call:
        return Call(weight, self._body.step).inside(flush=effect is FLUSH)

    def _gather(self, sharding: Sharding, effect: Effect) -> None:
        shell, storage = self._shell, self._body.storage
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
