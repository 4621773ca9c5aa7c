"""`Step`: one step of a pipeline, from the records before its gradients to the states behind it."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..buckets import GradBuffer, assign_
from ..groups import NO_SPAN, Communicator, Span
from ..records import StepRecord, Sums, numbers
from ..transforms.axes import Work, bind_axes
from ..transforms.base import Call, Transform, trees
from ..transforms.optimizers import masters_of, state_fields
from ..transforms.pipelines import FLUSH, Effect, Pipeline, Sharding
from ._body import StepData
from ._records import StepRecords
from ._reducer import Begun, Opened, Reducer
from ._verdict import Decision

STEP = "step"  # the span around the others


class StepRunner(Protocol):
    """What runs the steps of one pipeline on this rank: a train_step, or a registered module."""

    mesh: Communicator
    records: StepRecords
    reducer: Reducer

    @property
    def pipeline(self) -> Pipeline | None:
        """None: a hook alone, whose result somebody else steps with."""


class Step:
    """One step on this rank. Those who hold the parameters say in a subclass how they are stepped and gathered.

        one.open(record, values, counts, window_weight)      # records of weights leave, where a mean needs them first
        bucket.work = reducer.launch(index, bucket)          # in backward, for each bucket: its message leaves; `launch` names it
        one.close_pass(buckets)                              # sums arrive; ranks decide alike; the optimizer steps

    Attributes:
        sums: The record, summed over the ranks that share the gradients, once it is known.
        span: Takes the names of the parts of the step, where somebody watches.

    Args:
        body: The data of the state, which the step changes in place.
    """

    waits = False  # whether the host waits for the sums, so that it may decide at once

    def __init__(self, run: StepRunner, body: StepData, span: Span = NO_SPAN) -> None:
        self._run, self._body, self.span = run, body, span
        self.sums: dict[str, Any] | None = None
        self._begun: Begun = {}  # by axes, the records that were sent before the gradients
        self._counts: Sums | None = None  # the record of all ranks that loop together, where these are more
        self._total: Any = 1.0  # by which the gradients are still to be divided
        self._decision = Decision(FLUSH)

    def open(
        self,
        record: StepRecord,
        values: dict[str, Any],
        counts: dict[str, Any],
        window_weight: float,
        late_factor: Tensor | None = None,
        is_weighted: bool = False,
    ) -> None:
        """Send the records that go before the gradients, and prepare for these.

        Args:
            record: The record of the ranks that share the gradients.
            values: This rank's values in it.
            counts: This rank's values in the record of all ranks that loop together.
            window_weight, late_factor, is_weighted: See `Opened`.
        """
        run, body = self._run, self._body
        records, self._record, self._values = run.records, record, values
        self._sent = sent = records.sent_in(body.step)
        begun = {axes: records.record(axes).send(values) for axes in sent.before}
        if sent.known:
            begun[record.axes] = record.alike({**values, "weight": 1.0, "live": 1.0})
        self._begun = begun
        if sent.apart:
            self._counts = records.send(counts)
        if records.plan.reduce is None:
            records.check.grads.begin(records.plan, body.step)
        opened = Opened(body.storage, record, values, body.step, begun, window_weight, late_factor, is_weighted)
        run.reducer.start(body.hook, opened)

    def launch(self, index: int, bucket: GradBuffer) -> Work | None:
        """Start the messages of a full bucket, which have its number in traces."""
        with self._run.mesh.traffic.span(f"bucket {index}"):
            return self._run.reducer.launch(index, bucket)

    def close_pass(self, buckets: list[GradBuffer]) -> None:
        """Complete the step, whose buckets are all under way.

        Raises:
            NonFinite, DesyncError: on all ranks; the state is as before.
        """
        reducer, body, span = self._run.reducer, self._body, self.span
        span.next("wait for gradients")
        self.sums, self._total = reducer.finish(body.hook, body.storage, buckets)
        span.next("decide")
        self._decision = decision = self.decide(buckets)
        if decision.error is not None:
            self._refuse(decision.error)
        elif self._run.pipeline is not None and (skips := self._run.pipeline.skips) is not None:
            body.outer = decision.effect.update_counters(skips, body.outer)
        span.next("optimizer")
        self._step_params(buckets)
        if decision.error is None:
            self.end(decision.effect)
        span.next("states")
        body.hook = decision.effect.keep(reducer.new_state, body.hook)

    def flush(self) -> None:
        """Run now the transforms that would run in later steps."""
        self.end(FLUSH)

    # -- what differs by who holds the parameters ------------------------------------------------

    def _refuse(self, error: Exception) -> None:
        """Raise the error of a step that changes nothing."""
        raise error

    def _step_params(self, buckets: list[GradBuffer]) -> None:
        """Run the optimizer, if the decision is to."""
        raise NotImplementedError

    def _own_leaves(self) -> dict[str, Any]:
        """Path -> the values that this rank steps."""
        return self._body.storage.own_leaves()

    def _gather(self, sharding: Sharding, effect: Effect) -> None:
        """Give all ranks the parameters that each has stepped its pieces of."""
        raise NotImplementedError

    # -- what all have in common -----------------------------------------------------------------

    def decide(self, buckets: list[GradBuffer]) -> Decision:
        """What follows for this step from the record and the gradients, alike on all ranks that share these."""
        run, step = self._run, self._body.step
        records, sent, check = run.records, self._sent, run.records.check
        if run.pipeline is None:
            return Decision(Effect(True))
        if sent.pieces is not None:
            check.grads.share(buckets, run.mesh.axes[sent.pieces])
        if sent.verdict:
            self.sums = check.grads.verdict(buckets, self._record, self._values)
        assert self.sums is not None
        if self.waits:
            self.sums = numbers(self.sums, check.reads.now)
        late = None
        if self._record is not records.of_all:
            late = () if self._counts is None else records.read(step, self._counts)
        return check.decide(step, self.sums, buckets, self._total, run.reducer.clip, late)

    def end(self, effect: Effect) -> None:
        """Transform the parameters and the optimizer's state at the end of a step, and gather the parameters."""
        pipeline = self._run.pipeline
        if pipeline is None:
            return
        if pipeline.after is not None:
            self.run_end(pipeline.after, "params", effect)
        if pipeline.on_state is not None:
            self.run_end(pipeline.on_state, "optimizer", effect)
        if pipeline.sharding is not None:
            # A transform of the parameters may have changed them in a step without effect too.
            gathered = effect if pipeline.after is None else effect.at_end
            if gathered.steps is not False:
                self.span.next("gather of parameters")
                self._gather(pipeline.sharding, gathered)

    def _name(self, part: Transform, on: str) -> None:
        self.span.next(f"{part.spec.name or 'after'} of {on}")

    def run_end(self, part: Transform, on: Literal["params", "optimizer"], effect: Effect) -> None:
        """Run the transform of the parameters, or of their master copies, or of the optimizer's state."""
        body, storage, own, of_params = self._body, self._body.storage, self._own_leaves(), on == "params"
        self._name(part, on)
        call = self._call(0.0 if self.sums is None else self.sums["weight"], effect)
        call = call.inside(sharded_over=None if storage.pieces is None else storage.pieces.axis)
        states = storage.optimizer_states() if storage.has_masters or not of_params else {}
        if of_params:
            held: Any = masters_of(own, states) if states else own
            places, kept, lent = held, body.ends.after, [*storage.flats, *storage.exact, *held.values()]
        else:
            held = state_fields(states)
            places, kept, lent = trees.named_leaves(held), body.ends.on_state, held
        with torch.no_grad(), bind_axes(self._run.mesh.axes):
            new, fresh = effect.after(part, held, kept, call, None if of_params else own)
            fresh = trees.copy_if_aliased(fresh, lent)
            if new is not held:  # a transform with a period returns its input in the other steps
                assign_(places, new if of_params else trees.named_leaves(new))
                for path, param in own.items() if of_params else ():
                    if held[path] is not param:
                        param.copy_(held[path])
        body.ends = body.ends._replace(**{"after" if of_params else "on_state": fresh})

    def _call(self, weight: Any, effect: Effect) -> Call:
        return Call(weight, self._body.step).inside(flush=effect is FLUSH)
