"""The driver of steps on flat buckets: windows, forward and backward; its program does the rest."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._taken import warn_of_module_params
from ..groups._mesh import Mesh
from ..reducer._all_reduce import AllReduceHook
from ..reducer._arrivals import arrived
from ..reducer._bucket_hooks import BucketHook
from ..reducer._buckets import BucketQueue
from ..reducer._flat_params import Storage, copy_if_aliased
from ..reducer._grad_hooks import GradHooks
from ..reducer._lane import StepLane
from ..reducer._late_counts import LateCounts
from ..reducer._reduce_scatter import ReduceScatterHook
from ..reducer._step_check import StepCheck
from ..reducer._step_hook import StepHook
from ..reducer._step_ids import StepIds
from ..transforms._axis_env import bind_axes, bind_weight
from ..transforms._transform import Transform
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.plan._plan import make_plan
from ..transforms.program._effect import FLUSH
from ..transforms.program._execute import execute
from ..transforms.program._ops import Program
from ..transforms.program._program import Parts, program
from ._apply import tears
from ._deferred import DeferredMessages
from ._flat_memory import FlatMemory
from ._float16 import Units
from ._join_steps import Iteration
from ._loss import Loss, user_sums
from ._loss_weight import GradOutput, Unscaler, grad_output_of
from ._metrics import Metrics
from ._record_of_all import RecordOfAll
from ._shadowed import shadowed
from ._state import StateData

NOTHING = GradOutput(0.0)  # for a backward pass whose gradients are discarded


class Run:
    """Runs the steps of one pipeline on this rank; `TrainStep` is its public face."""

    def __init__(
        self,
        loss: Loss,
        pipeline: Pipeline,
        mesh: Mesh,
        accumulate: int,
        overlap_step: bool,
        overlap_gather: bool,
        on_buffers: Transform,
    ) -> None:
        self._loss, self.pipeline, self.mesh, self._accumulate = loss, pipeline, mesh, accumulate
        self._plan = plan = make_plan(pipeline.hook, mesh.shape, *pipeline.ends, on_buffers)
        self.on_buffers = on_buffers
        self.weighs = "weight(batch)" if loss.weighs else "1 for each rank with a batch"
        self.axes = plan.agree
        self._shadowed = shadowed(mesh.axes, self.axes)
        self._counts = StepLane(mesh, self.axes)  # over all ranks that loop together
        self._lanes = {self.axes: self._counts}  # by axes: over the ranks that the hook reduces over
        self.ranks = self._counts.ranks
        self._ids = StepIds(mesh, self.axes, self.ranks)
        self.step_check = StepCheck(
            self.ranks, norm=plan.clip is not None, skips=pipeline.skips is not None, mesh=mesh, ids=self._ids
        )
        self.hook: StepHook
        self._early: AllReduceHook | None = None  # set where buckets are stepped as their messages arrive
        reduced, lane = plan.reduced(0).axes, self._lane(0)
        if plan.reduce is not None:
            kind = ReduceScatterHook if plan.reduce.sharded_over else AllReduceHook
            self.hook = plain = kind(plan, mesh, lane, self.step_check)
            steps_early = overlap_step and plain.direct and pipeline.skips is None and lane is self._counts
            self._early = plain if steps_early else None
        else:
            self.hook = BucketHook(plan, mesh, lane, self.step_check, accumulate > 1)
        self._deferred = DeferredMessages(mesh)
        weakref.finalize(self, self._deferred.clear).atexit = False  # each message under way has a thread
        overlaps = pipeline.after is not None and pipeline.after.accepts("prefetch") and mesh.device.type == "cpu"
        self.prefetch = self._deferred if overlaps and self._deferred.travel else None
        self.late_counts = LateCounts((*pipeline.ends, on_buffers), mesh.shape, self.step_check.check_step)
        self._of_all = RecordOfAll(
            self._counts, self._ids, self.step_check, self.late_counts, lambda at: plan.reduced(at).axes != plan.agree
        )
        sharding, self.overlap_gather = pipeline.sharding, overlap_gather
        # Whether each bucket's gather begins once it has been stepped.
        self.gathers_buckets = sharding is not None and sharding.codec is None and pipeline.after is None
        shards = None if sharding is None else sharding.axis
        self._parts = Parts(pipeline.after, pipeline.on_state, shards, pipeline.skips is not None, on_buffers)
        self._programs: dict[
            bool, Program
        ] = {}  # of steps that are all alike, in which buckets are stepped as they arrive or not
        self._units = Units(self.hook, self.step_check, mesh, reduced, loss.weighs and bool(reduced), accumulate)
        self._reached = False  # whether a backward pass has reached a parameter
        self._unscaler = Unscaler(self.hook) if pipeline.skips and pipeline.skips.scaled else None
        self._queue: BucketQueue | None = None
        self.token = object()  # identifies this step in its states, without keeping it alive
        self._grad_hooks = GradHooks()

    def number(self) -> None:
        """Take the next number among the steps of this mesh. It travels in the lane, to be compared between ranks."""
        if not self._ids.number:
            self.mesh.use.steps += 1
            self._ids.number = self.mesh.use.steps

    def _lane(self, step: int) -> StepLane:
        """The lane over the axes that the hook reduces over in a step."""
        axes = self._plan.reduced(step).axes
        if axes not in self._lanes:
            self._lanes[axes] = StepLane(self.mesh, axes)
        return self._lanes[axes]

    def check_loss(self, buffers: bool) -> None:
        """Raise where `loss_fn` cannot be called with (or without) buffers; see `Loss.check`."""
        self._loss.check(buffers)

    def close(self) -> None:
        """Free buffers and hooks, and drop the messages under way."""
        self._grad_hooks.detach()
        self._grad_hooks.queue = self._queue = None
        for lane in self._lanes.values():
            lane.buffer = None
        self._of_all.close()
        self._deferred.clear()
        self.hook.close()

    def forget(self) -> None:
        """Forget the steps so far: a new run begins."""
        self.late_counts.clear()
        self.step_check.clear()

    def flush(self, body: StateData) -> None:
        """Run now the transforms that would run in later steps; see `TrainStep.flush`."""
        self._of_all.begin_flush(body)
        body.storage.arrivals.wait()
        body.torn = tears(body.step)
        execute(self._parts.ends, FlatMemory(self, body, 0.0, None), FLUSH)
        body.torn = ""

    def drop(self) -> None:
        """Drop the messages under way, after a failure."""
        self._deferred.clear()

    def stop(self) -> None:
        """Take no more gradients until the next step."""
        self.hook.stop()
        if self._queue is not None:
            self._queue.stop()

    def drain(self, step: int) -> None:
        """Raise, at the end of a loop, for a last step that some ranks left out and others took."""
        if self.pipeline.skips is None:
            self._of_all.drain(step)

    # -- a step ------------------------------------------------------------------------------

    def __call__(self, body: StateData, batch: Any, iteration: Iteration | None) -> Metrics:
        storage = body.storage
        rates = storage.check_rates()
        self._grad_hooks.attach(storage)
        self.stop()
        live = iteration is None or iteration.live
        weight = self._loss.weigh(batch) if live else 0.0
        replayed: Tensor | None = None
        if weight or iteration is None or not iteration.replays:
            axes = self.mesh.axes if iteration is None or iteration.replays or self.ranks == 1 else self._shadowed
            loss, aux, buffers = self._forward(body, batch, weight, axes) if weight else (None, None, body.buffers)
        else:  # run the model, so that its own collectives include this rank
            replayed, _, buffers = self._forward(body, batch, 0.0, self.mesh.axes)
            loss, aux = None, None
        share = weight if self.hook.by_weight else float(weight > 0)
        if not body.window:
            body.unit = self._units.of_window(storage, weight)
        self.hook.unit = body.unit
        scale = body.outer.scale if self._unscaler is not None else None
        grad_output = grad_output_of(loss, share, self.hook, scale, self._accumulate > 1)
        own = self._counts.values(grad_output.share, weight, loss, {} if loss is None else user_sums(aux), body.window)
        if not body.window:
            storage.clear_grads()  # a backward pass outside the step may have left gradients
            body.buffers_before, body.batches_before, body.version_before = body.buffers, body.batches, body.version
        if (body.calls + 1) % self._accumulate:  # within a window: nothing is sent
            if loss is not None:
                with self._grad_hooks.keeping():
                    self._backward(grad_output, loss, storage)
            elif replayed is not None:
                with storage.grads_aside(), self._grad_hooks.keeping():
                    NOTHING.backward(replayed)
            body.window, body.buffers, body.calls = own, buffers, body.calls + 1
            body.batches += live
            return Metrics(body.step, False, aux, dict, partial(self.step_check.raise_pending, newest=True))

        if self._queue is None:
            settled = self._counts.agree(own)
            queue = BucketQueue(self.hook.prepare(storage), (self._unscaler or self.hook).launch)
            # Where no rank has a batch yet, the ranks agree again in the next step.
            self._grad_hooks.queue = self._queue = queue if settled else None
        else:
            queue = self._queue
        self._counts.check(own)
        self._counts.step_id = self._ids.begin(body.step, rates)
        counts, lane = self._counts.complete(own, iteration is not None and iteration.has_next), self._lane(body.step)
        values = counts if lane is self._counts else lane.complete(own)
        if self._unscaler is not None:
            self._unscaler.rest = grad_output.rest

        def backward() -> None:
            if loss is not None:
                self._backward(grad_output, loss, storage, 3)
            elif replayed is not None:
                with queue.muted(storage):
                    NOTHING.backward(replayed)

        memory = FlatMemory(self, body, values["weight"], buffers)
        memory.begin(queue, backward, lane, values, partial(self._of_all.send, counts, storage.layout))
        execute(self._program(body, queue), memory)
        of_all = memory.of_all
        if iteration is not None:
            iteration.others = partial(self._of_all.has_next, of_all)
        step = body.step
        body.window = {}
        body.batches += live
        body.calls, body.step = body.calls + 1, body.step + 1
        return Metrics(
            step, True, aux, lambda: StepCheck.host(of_all()), partial(self.step_check.raise_pending, newest=True)
        )

    def _program(self, body: StateData, queue: BucketQueue) -> Program:
        """The program of the step from this state."""
        early, reads = self._early, self.step_check.readable_without_sync(queue.outgoing)
        each = early is not None and reads and early.knows_scale(body.hook)
        if self._plan.always is None:
            return program(self._plan, self._parts, body.step, "buckets", each)
        if each not in self._programs:
            self._programs[each] = program(self._plan, self._parts, body.step, "buckets", each)
        return self._programs[each]

    def _backward(self, grad_output: GradOutput, loss: Tensor, storage: Storage, inside: int = 0) -> None:
        """Run the backward pass, and check that it reaches a parameter, until one pass has.

        Args:
            inside: The number of calls between `__call__` and this one, for the place of a warning.

        Raises:
            ValueError: it reaches no parameter.
        """
        grad_output.backward(loss)
        if self._reached:
            return
        queue = self._grad_hooks.queue
        taken = queue is not None and any(any(out.taken) for out in queue.outgoing)
        kept = bool(storage.window) or any(leaf.grad is not None for leaf in storage.leaves.values())
        if storage.leaves and not taken and not kept:
            raise ValueError(
                "the loss depends on none of params: no parameter has got a gradient. Does loss_fn call the module itself? Then write "
                "apply, params, buffers = fjoin.functional(module) and call apply(params, buffers, ...) in loss_fn; to leave a "
                "batch out, give it weight 0"
            )
        self._reached = True
        warn_of_module_params(loss, stacklevel=6 + inside)

    def _forward(
        self, body: StateData, batch: Any, weight: float, axes: dict[str, Any]
    ) -> tuple[Tensor, Any, dict[str, Tensor] | None]:
        storage = body.storage
        params = body.rebuild(storage.arrivals.lend(storage.leaves, storage.by_bucket))
        with torch.enable_grad(), bind_axes(axes), bind_weight(weight):
            loss, aux, buffers = self._loss(params, body.buffers, batch)
        if aux is not None or buffers is not None:
            aux, buffers = copy_if_aliased((aux, buffers), storage.written(bool(body.window)))
        return arrived(loss), aux, buffers
