"""The driver of steps on flat buckets: windows, forward and backward; its program does the rest."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._taken import warn_of_module_params
from ..groups._mesh import Mesh
from ..reducer._agreements import Agreements
from ..reducer._all_reduce import AllReduceHook
from ..reducer._arrivals import arrived
from ..reducer._bucket_hooks import BucketHook
from ..reducer._buckets import BucketQueue
from ..reducer._flat_params import Storage, copy_if_aliased
from ..reducer._grad_hooks import GradHooks
from ..reducer._reduce_scatter import ReduceScatterHook
from ..reducer._step_check import numbers
from ..reducer._step_hook import StepHook
from ..reducer._step_ids import Calls
from ..reducer._step_record import own_values
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
from ._shadowed import shadowed
from ._state import StateData

CALLS = Calls(
    step="a step",
    differ="the ranks have called different train_steps of one mesh",
    remedy="Call them in the same order on all ranks, from one thread, or give each step its own fjoin.mesh(...)",
    flush="step.flush",
    even="Take the same number of steps on all ranks, with step.join where their inputs differ",
)
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
        sharding, self.overlap_gather = pipeline.sharding, overlap_gather
        shards = None if sharding is None else sharding.axis
        self._parts = Parts(pipeline.after, pipeline.on_state, shards, pipeline.skips is not None, on_buffers)
        self.agreements = Agreements(mesh, plan, self._parts, "buckets", CALLS, norm=plan.clip is not None)
        self.ranks, self.step_check = self.agreements.ranks, self.agreements.check
        self.hook: StepHook
        self._early: AllReduceHook | None = None  # set where buckets are stepped as their messages arrive
        reduced, record = plan.reduced(0).axes, self.agreements.of_hook(0)
        if plan.reduce is not None:
            kind = ReduceScatterHook if plan.reduce.sharded_over else AllReduceHook
            self.hook = plain = kind(plan, mesh, record, self.step_check.grads)
            steps_early = overlap_step and plain.direct and pipeline.skips is None and reduced == self.axes
            self._early = plain if steps_early else None
        else:
            self.hook = BucketHook(plan, mesh, record, self.step_check.grads, accumulate > 1)
        self._deferred = DeferredMessages(mesh)
        weakref.finalize(self, self._deferred.clear).atexit = False  # each message under way has a thread
        overlaps = pipeline.after is not None and pipeline.after.accepts("prefetch") and mesh.device.type == "cpu"
        self.prefetch = self._deferred if overlaps and self._deferred.travel else None
        # Whether each bucket's gather begins once it has been stepped.
        self.gathers_buckets = sharding is not None and sharding.codec is None and pipeline.after is None
        self._programs: dict[
            bool, Program
        ] = {}  # of steps that are all alike, in which buckets are stepped as they arrive or not
        self._units = Units(self.hook, self.step_check, mesh, reduced, loss.weighs and bool(reduced), accumulate)
        self._reached = False  # whether a backward pass has reached a parameter
        self._unscaler = Unscaler(self.hook) if pipeline.skips and pipeline.skips.scaled else None
        self._queue: BucketQueue | None = None
        self.token = object()  # identifies this step in its states, without keeping it alive
        self._grad_hooks = GradHooks()

    def check_loss(self, buffers: bool) -> None:
        """Raise where `loss_fn` cannot be called with (or without) buffers; see `Loss.check`."""
        self._loss.check(buffers)

    def close(self) -> None:
        """Free buffers and hooks, and drop the messages under way."""
        self._grad_hooks.detach()
        self._grad_hooks.queue = self._queue = None
        self._deferred.clear()
        self.hook.close()

    def forget(self) -> None:
        """Forget the steps so far: a new run begins."""
        self.agreements.forget()

    def flush(self, body: StateData) -> None:
        """Run now the transforms that would run in later steps; see `TrainStep.flush`."""
        self.agreements.fit(body.storage.layout)
        self.agreements.begin_flush(body.step)
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
        own = own_values(grad_output.share, weight, loss, {} if loss is None else user_sums(aux), body.window)
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

        agreements, of_all = self.agreements, self.agreements.of_all
        if self._queue is None:
            settled = of_all.agree(own)
            agreements.fit(storage.layout)
            queue = BucketQueue(self.hook.prepare(storage), (self._unscaler or self.hook).launch)
            # Where no rank has a batch yet, the ranks agree again in the next step.
            self._grad_hooks.queue = self._queue = queue if settled else None
        else:
            queue = self._queue
        of_all.check(own)
        step_id, record = agreements.begin(body.step, rates), agreements.of_hook(body.step)
        counts = of_all.complete(own, step_id, iteration is not None and iteration.has_next)
        values = counts if record is of_all else record.complete(own, step_id)
        if self._unscaler is not None:
            self._unscaler.rest = grad_output.rest

        def backward() -> None:
            if loss is not None:
                self._backward(grad_output, loss, storage, 3)
            elif replayed is not None:
                with queue.muted(storage):
                    NOTHING.backward(replayed)

        memory = FlatMemory(self, body, values["weight"], buffers)
        memory.begin(queue, backward, record, values, counts)
        execute(self._program(body, queue), memory)
        sums_of_all = memory.of_all
        if iteration is not None:
            iteration.others = lambda: agreements.has_next(sums_of_all())
        step = body.step
        body.window = {}
        body.batches += live
        body.calls, body.step = body.calls + 1, body.step + 1
        return Metrics(
            step, True, aux, lambda: numbers(sums_of_all()), partial(self.step_check.raise_pending, newest=True)
        )

    def _program(self, body: StateData, queue: BucketQueue) -> Program:
        """The program of the step from this state."""
        early, reads = self._early, self.step_check.grads.readable_without_sync(queue.outgoing)
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
