"""One train_step on this rank: windows, the forward and the backward pass, and the step's program over a `FlatMemory`."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..agreement import numbers, own_values
from ..buckets import BucketQueue, Storage
from ..groups import Communicator
from ..step import STEP, Agreements, StateData, StepCheck, StepHook, make_hook, named, spanned
from ..transforms.base import Transform
from ..transforms.pipelines import FLUSH, Pipeline, Program, Programs, execute, make_plan, parts_of
from ._failures import CALLS
from ._flat_memory import FlatMemory, tears
from ._loss import Loss, user_sums
from ._metrics import LearningRates, Meter, Metrics, RecordedNorms
from ._passes import Forward, GradOutput, Iteration, Passes, grad_output_of


class Run:
    """Runs the steps of one pipeline on this rank; `TrainStep` is its public face."""

    pipeline: Pipeline
    mesh: Communicator
    accumulate: int
    on_buffers: Transform | None
    ends: tuple[Transform, ...]
    ranks: int
    step_check: StepCheck
    recorded_norms: RecordedNorms

    def __init__(
        self,
        loss: Loss,
        pipeline: Pipeline,
        mesh: Communicator,
        accumulate: int,
        on_buffers: Transform | None,
    ) -> None:
        self.pipeline, self.mesh, self.accumulate = pipeline, mesh, accumulate
        parts = parts_of(pipeline, on_buffers)
        self.on_buffers, self.ends = on_buffers, parts.transforms
        plan = make_plan(pipeline.hook, mesh.shape, *self.ends, adds=accumulate > 1)
        self.weighs = "weight(batch)" if loss.weighs else "1 for each rank with a batch"
        self.axes: tuple[str, ...] = plan.agree
        sharding = pipeline.sharding
        self._programs = Programs(plan, parts, "buckets")
        self.agreements: Agreements = Agreements(mesh, self._programs, CALLS, norm=plan.clip is not None)
        self.ranks, self.step_check = self.agreements.ranks, self.agreements.check
        record = self.agreements.of_hook(0)
        self.hook: StepHook = make_hook(plan, mesh, record, self.step_check.grads, accumulate > 1)
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
        self.hook.close()

    def flush(self, body: StateData) -> None:
        """Run now the transforms that would run in later steps; see `TrainStep.flush`."""
        self.agreements.fit(body.storage.layout)
        self.agreements.begin_flush(body.step)
        body.torn = tears(body.step)
        execute(self._programs.parts.ends, FlatMemory(self, body, 0.0, None), FLUSH)
        self.ends_here(body)
        body.torn = ""

    def ends_here(self, body: StateData) -> None:
        """Note where the state's last step ends in the stream of its device."""
        if body.storage.layout:
            device = body.storage.layout[0].device
            body.ended = self.mesh.use.unfinished.end(body.step, device)

    def unused(self) -> list[str]:
        """The paths of the parameters that have never got a gradient on this rank."""
        outgoing = [] if self._queue is None else self._queue.outgoing
        return [path for out in outgoing for path, used in zip(out.bucket.paths, out.used, strict=True) if not used]

    def stop(self) -> None:
        """Take no more gradients until the next step."""
        self.hook.stop()
        if self._queue is not None:
            self._queue.stop()

    # -- a step ------------------------------------------------------------------------------

    def __call__(self, body: StateData, batch: Any, iteration: Iteration | None) -> Metrics:
        with self.mesh.traffic.span(STEP):
            return self._step(body, batch, iteration)

    def _step(self, body: StateData, batch: Any, iteration: Iteration | None) -> Metrics:
        storage, passes = body.storage, self.passes
        with self.mesh.traffic.span("prepare"):
            self._meter.begin(bool(body.window))
            rates, weight = storage.check_rates(), passes.weigh(batch, iteration)
        live, comes, reads = iteration is None or iteration.live, self.step_check.synchronize, self.step_check.reads
        if (body.calls + 1) % self.accumulate:  # within a window: nothing is sent
            forward, grad_output, own = self._forward(body, batch, weight, body.calls, iteration)
            with self.mesh.traffic.span("backward"):
                passes.backward_within(forward, grad_output, storage)
            body.window, body.buffers, body.calls = own, forward.buffers, body.calls + 1
            body.batches += live
            self._meter.end()
            return Metrics(body.step, False, forward.aux, dict, comes)

        with self.mesh.traffic.span("prepare"):
            skipped: Any = 0 if self.pipeline.skips is None else body.outer.skipped
            others = {"ranks": self.ranks, **self._learning_rates(storage, body.step, skipped)}
            has_next = self.agreements.requests.write(iteration is not None and iteration.has_next)
            step_id = self.agreements.begin(body.step, rates)
        forward, grad_output, own = self._forward(body, batch, weight, body.calls, iteration)
        with self.mesh.traffic.span("prepare"):
            memory, program = self._begin(body, forward, grad_output, own, step_id, has_next)
        execute(program, spanned(memory, self.mesh.traffic))
        of_all = memory.of_all
        if iteration is not None:
            iteration.others = lambda: self.agreements.has_next(of_all())
        self.ends_here(body)
        body.window = {}
        body.batches += live
        body.calls, body.step = body.calls + 1, body.step + 1
        others |= {**memory.measured, **self._meter.end()}
        summed = lambda: numbers(of_all(), reads.now)  # noqa: E731
        return Metrics(body.step - 1, True, forward.aux, summed, comes, others, self.mesh.rank)

    def _forward(
        self, body: StateData, batch: Any, weight: float, number: int, iteration: Iteration | None
    ) -> tuple[Forward, GradOutput, dict[str, Any]]:
        """Run the forward pass; returns it, what backward starts from, and this rank's values of the window so far."""
        hooks, span = self.passes.hooks, self.mesh.traffic.span
        with span("prepare"):
            if body.storage.follow_stream():
                hooks.detach()
            hooks.attach(body.storage)
            self.stop()
        with span("forward"):
            forward = self.passes.forward(body, batch, weight, number, iteration)
        with span("prepare"):
            return forward, *self._own(body, forward)

    def _own(self, body: StateData, forward: Forward) -> tuple[GradOutput, dict[str, Any]]:
        """What backward starts from, and this rank's values of the window so far."""
        loss, weight = forward.loss, forward.weight
        counted = weight if self.hook.by_weight else float(weight > 0)
        if not body.window or not body.window["weight"]:
            body.first = counted or 1.0
        scale = body.outer.scale if self._scales else None
        factor = self.hook.loss_factor(counted, body.first, body.storage.float16)
        grad_output = grad_output_of(loss, factor, scale, self.accumulate > 1)
        sums = {} if loss is None else user_sums(forward.aux)
        own = own_values(weight * grad_output.rounding, loss, sums, body.window)
        if not body.window:
            body.storage.clear_grads()  # a backward pass outside the step may have left gradients
            body.buffers_before, body.batches_before, body.version_before = body.buffers, body.batches, body.version
        return grad_output, own

    def _begin(
        self,
        body: StateData,
        forward: Forward,
        grad_output: GradOutput,
        own: dict[str, Any],
        step_id: float,
        has_next: float,
    ) -> tuple[FlatMemory, Program]:
        """The memory of a step that ends a window, and its program."""
        agreements, queue = self.agreements, self._queue_of(body.storage, own)
        agreements.of_all.check(own)
        record = agreements.of_hook(body.step)
        counts = agreements.of_all.complete(own, step_id, has_next)
        values = counts if record is agreements.of_all else record.complete(own, step_id)
        self.hook.factor = grad_output.rest
        memory = FlatMemory(self, body, values["weight"], forward.buffers)
        backward = partial(self.passes.backward, forward, grad_output, body.storage)
        memory.begin(queue, backward, record, values, counts)
        return memory, self._programs.of(body.step)

    def _queue_of(self, storage: Storage, own: dict[str, Any]) -> BucketQueue:
        """The queue of this step's buckets. In the first step the ranks agree on the names of the user's sums."""
        if self._queue is not None:
            return self._queue
        settled = self.agreements.of_all.agree(own)
        self.agreements.fit(storage.layout)
        queue = BucketQueue(self.hook.prepare(storage), named(self.hook.launch, self.mesh.traffic))
        self.passes.hooks.queue = queue
        # Where no rank has a batch yet, the ranks agree again in the next step.
        self._queue = queue if settled else None
        return queue
