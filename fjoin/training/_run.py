"""One train_step on this rank: windows, the forward and the backward pass, and a `FlatStep`."""

from __future__ import annotations

from typing import Any

from ..buckets import BucketQueue, Storage
from ..groups import NO_SPAN, Communicator, Span
from ..records import numbers, own_values
from ..step import STEP, Reducer, StateData, StepRecords, make_reducer
from ..transforms.base import Transform, shares
from ..transforms.pipelines import Pipeline, make_plan, parts_of
from ._flat_step import FlatStep
from ._loss import Loss, user_sums, weigh
from ._metrics import LearningRates, Meter, Metrics, RecordedNorms
from ._passes import Forward, GradOutput, Iteration, Passes, grad_output_of
from ._step_failures import CALLS


class Run:
    """Runs the steps of one pipeline on this rank; `TrainStep` is its public face."""

    def __init__(
        self, loss: Loss, pipeline: Pipeline, mesh: Communicator, accumulate: int, on_buffers: Transform | None
    ) -> None:
        self.loss, self.pipeline, self.mesh, self.accumulate = loss, pipeline, mesh, accumulate
        parts = parts_of(pipeline, on_buffers)
        self.on_buffers, self.ends = on_buffers, parts.ends
        plan = make_plan(pipeline.hook, mesh.shape, *self.ends, adds=accumulate > 1)
        self.axes: tuple[str, ...] = plan.loop_axes
        sharding = pipeline.sharding
        self.records: StepRecords = StepRecords(mesh, plan, parts, "buckets", CALLS, norm=plan.clip is not None)
        self.ranks, self.step_check = self.records.ranks, self.records.check
        self.reducer: Reducer = make_reducer(plan, mesh, self.records, "buckets")
        # Whether each bucket's gather begins once it has been stepped.
        self.gathers_buckets: bool = sharding is not None and sharding.codec is None and pipeline.after is None
        self.passes: Passes = Passes(loss, mesh, self.axes, self.ranks)
        self._scales = pipeline.skips is not None and pipeline.skips.scaled
        self._queue: BucketQueue | None = None
        self._meter, self.recorded_norms = Meter(mesh), RecordedNorms()
        self._learning_rates = LearningRates()
        self.token: object = object()  # identifies this step in its states, without keeping it alive

    def close(self) -> None:
        """Free buffers and hooks."""
        self.passes.hooks.detach()
        self.passes.hooks.queue = self._queue = None
        self.reducer.close()

    def flush(self, body: StateData) -> None:
        """Run now the transforms that would run in later steps; see `TrainStep.flush`."""
        self.records.fit(body.storage.layout)
        self.records.begin_flush(body.step)
        body.torn = True
        one, body.buffers_before = FlatStep(self, body), body.buffers
        one.flush()
        if body.buffers is not None:
            one.end_buffers(body.buffers, 0.0)
        self.ends_here(body)
        body.torn = False

    def ends_here(self, body: StateData) -> None:
        """Note where the state's last step ends in the stream of its device."""
        if body.storage.on_accelerator:
            body.ended = self.mesh.unfinished.end(body.step, body.storage.layout[0].device)

    def unused(self) -> list[str]:
        """The paths of the parameters that have never got a gradient on this rank."""
        buckets = [] if self._queue is None else self._queue.buckets
        every = (pair for bucket in buckets for pair in zip(bucket.layout.paths, bucket.used, strict=True))
        return [path for path, used in every if not used]

    def stop(self) -> None:
        """Take no more gradients until the next step."""
        self.reducer.stop()
        if self._queue is not None:
            self._queue.stop()

    # -- a step ------------------------------------------------------------------------------

    def __call__(self, body: StateData, batch: Any, iteration: Iteration | None) -> Metrics:
        with self.mesh.traffic.span(STEP) as span:
            return self._step(body, batch, iteration, span)

    def _step(self, body: StateData, batch: Any, iteration: Iteration | None, span: Span) -> Metrics:
        storage, passes, records = body.storage, self.passes, self.records
        span.next("prepare")
        self._meter.begin(bool(body.window))
        has_batch = iteration is None or iteration.has_batch
        comes = self.step_check.synchronize
        rates, weight = storage.check_rates(), weigh(self.loss.weight, batch) if has_batch else 0.0
        within = bool((body.calls + 1) % self.accumulate)  # a window: nothing is sent
        if not within:
            skipped: Any = 0 if self.pipeline.skips is None else body.outer.skipped
            others = {"ranks": self.ranks, **self._learning_rates(storage, body.step, skipped)}
            if self.mesh.generation:
                others["generation"] = self.mesh.generation
            has_next = records.own_requests.write(iteration is not None and iteration.has_next)
            step_id = records.begin(body.step, rates)
        if storage.on_accelerator and storage.follow_stream():
            passes.hooks.detach()
        passes.hooks.attach(storage, one_pass=self.accumulate == 1)
        span.next("forward")
        forward = passes.forward(body, batch, weight, body.calls, iteration)
        span.next("prepare")
        mixed = forward.call.mixed
        is_weighted = bool(mixed) and records.plan.starts_from_weight(body.step, mixed)
        grad_output, own = self._own(body, forward, is_weighted)
        if within:
            span.next("backward")
            passes.backward(forward, grad_output, storage, within)
            body.window, body.buffers, body.calls = own, forward.buffers, body.calls + 1
            body.batches += has_batch
            self._meter.end()
            return Metrics(body.step, False, forward.aux, dict, comes)
        queue = self._queue or self._first_queue(storage, own)
        records.of_all.check(own)
        counts = records.of_all.complete(own, step_id, has_next)
        one = FlatStep(self, body, span)
        self._send(body, one, queue, counts, own, forward, grad_output, is_weighted, iteration)
        body.batches += has_batch
        body.calls, body.step = body.calls + 1, body.step + 1
        others |= {**one.measured, **self._meter.end()}
        of_all, reads = one.of_all, self.step_check.reads
        summed = lambda: numbers(of_all(), reads.now)  # noqa: E731
        return Metrics(body.step - 1, True, forward.aux, summed, comes, others, self.mesh.rank)

    def _send(
        self, body: StateData, one: FlatStep, queue: BucketQueue, counts: dict[str, Any], own: dict[str, Any],
        forward: Forward, grad_output: GradOutput, is_weighted: bool, iteration: Iteration | None,
    ) -> None:  # fmt: skip
        """The second half of a step: the record, the backward pass with its messages, the optimizer, the ends.

        Args:
            counts: This rank's values in the record of all ranks that loop together.
            own: This rank's values of the window.
        """
        records, span = self.records, one.span
        record = records.of_hook(body.step)
        values = counts if record is records.of_all else record.complete(own, counts["step_id"])
        span.next("sum the record")
        one.open(record, values, counts, body.window_weight, grad_output.late_factor, is_weighted)
        span.next("backward and launches")
        queue.start(body.storage, self.reducer.launch if span is NO_SPAN else one.launch)
        self.passes.backward(forward, grad_output, body.storage, within=False)
        queue.finish()
        one.buffers = forward.buffers, values["weight"]
        try:
            one.close_pass(queue.buckets)
        finally:  # a step that is left out ends the loop too, where no rank has another batch
            if iteration is not None and one.sums is not None:
                iteration.others = lambda of_all=one.of_all: records.has_next(of_all())  # type: ignore[misc]
        queue.free()
        body.torn = False
        self.ends_here(body)
        body.window = {}

    def _own(self, body: StateData, forward: Forward, is_weighted: bool) -> tuple[GradOutput, dict[str, Any]]:
        """What backward starts from, and this rank's values of the window so far.

        Args:
            is_weighted: See `Opened`. Ranks whose losses are mixed need one unit of their weights.
        """
        loss, weight = forward.loss, forward.weight
        counted = self.records.plan.counted(weight, body.step)
        if not body.window or not body.window["weight"]:
            body.window_weight = 1.0 if is_weighted else counted or 1.0
        elif is_weighted and body.window_weight != 1.0 and (self.records.plan.reduce is None or body.storage.float16):
            raise ValueError(
                "loss_fn has communicated in this call of an accumulation window, and not in the first one; let each call communicate"
            )
        if is_weighted and loss is not None:
            shares.check_exact(loss, counted)
        scale = body.outer.scale if self._scales else None
        seed = self.reducer.scaling.seed(counted, body.window_weight, body.storage.float16)
        grad_output = grad_output_of(loss, seed, scale, self.accumulate > 1, is_weighted)
        sums = {} if loss is None else user_sums(forward.aux)
        own = own_values(weight * grad_output.rounding, loss, sums, body.window)
        if not body.window:
            body.storage.clear_grads()  # a backward pass outside the step may have left gradients
            body.buffers_before, body.batches_before, body.version_before = body.buffers, body.batches, body.version
        return grad_output, own

    def _first_queue(self, storage: Storage, own: dict[str, Any]) -> BucketQueue:
        """The queue of the buckets. In the first step the ranks compare the names of the user's sums."""
        settled = self.records.of_all.take_names(own)
        self.records.fit(storage.layout)
        queue = BucketQueue(self.reducer.prepare(storage))
        self.passes.hooks.queue = queue
        # If no rank has a batch yet, the ranks compare them again in the next step.
        self._queue = queue if settled else None
        return queue
