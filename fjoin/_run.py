"""One step on flat buckets: forward, backward with messages under way, verdict, optimizer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._apply import changing, run_after, step_bucket
from ._float16 import Units
from ._guard import Guard, Verdict
from ._hook import HookRun, RunsHook
from ._join import Turn
from ._lane import StepLane
from ._loss import Loss, user_sums
from ._mesh import Mesh
from ._metrics import Metrics
from ._plain import PlainHook
from ._seed import Seed, Unscaling, seed_of
from ._shadowed import shadowed
from ._state import Body
from ._storage import Storage, apart
from ._taps import Taps
from ._wire import Outgoing, Queue
from .transforms._base import Pipeline, Transform
from .transforms._plan import make_plan
from .transforms.axes._collectives import axis_index
from .transforms.axes._env import bind_axes, bind_weight

NOTHING = Seed(0.0)  # for a backward pass that counts nothing


class Run:
    """Runs the steps of one pipeline on this rank; `TrainStep` is its public face."""

    def __init__(
        self,
        loss: Loss,
        pipeline: Pipeline,
        mesh: Mesh,
        accumulate: int,
        overlap_step: bool,
        on_buffers: Transform,
    ) -> None:
        self._loss, self.pipeline, self.mesh, self._accumulate = loss, pipeline, mesh, accumulate
        plan = make_plan(pipeline.hook, tuple(mesh.shape))
        self.on_buffers = on_buffers
        self.weighs = "weight(batch)" if loss.weighs else "1 for each rank with a batch"
        self.axes = plan.axes
        self._shadowed = shadowed(mesh.axes, self.axes)
        self.ranks = math.prod(axis.size for axis in mesh.over(self.axes))
        self.guard = Guard(self.ranks, norm=plan.clip is not None, skips=pipeline.skips is not None, mesh=mesh)
        with bind_axes(mesh.axes):
            index = int(axis_index(self.axes))
        self._lane = StepLane(mesh, self.axes, self.ranks, index)
        self.hook: RunsHook
        self._early: PlainHook | None = None  # where buckets are stepped as they come
        if plan.reduce is not None:
            self.hook = plain = PlainHook(pipeline.hook, plan, mesh, self._lane, self.guard)
            self._early = plain if overlap_step and plain.direct and pipeline.skips is None else None
        else:
            self.hook = HookRun(pipeline.hook, plan, mesh, self._lane, self.guard, accumulate > 1)
        self._units = Units(self.hook, self.guard, mesh, self.axes, loss.weighs, accumulate)
        self._reached = False  # whether a backward pass has reached a parameter
        self._unscaling = Unscaling(self.hook) if pipeline.skips and pipeline.skips.scaled else None
        self._queue: Queue | None = None
        self.token = object()  # by which states know the step they belong to, without keeping it alive
        self._taps = Taps()

    def number(self) -> None:
        """Take the next number among the steps of this mesh. It travels in the lane, where it must be the same on all ranks."""
        if not self._lane.step_id:
            self.mesh.use.steps += 1
            # From 2048 on and below 4096, so that none is a multiple of another; scattered, so that few means are.
            self._lane.step_id = self.guard.step_id = 2048.0 + self.mesh.use.steps * 1103 % 2048

    def check_loss(self, buffers: bool) -> None:
        """Raise where `loss_fn` cannot be called with buffers, or without; see `Loss.check`."""
        self._loss.check(buffers)

    def close(self) -> None:
        """Free buffers and hooks."""
        self._taps.detach()
        self._taps.queue = self._queue = self._lane.wire = None
        self.hook.close()

    def stop(self) -> None:
        """Take no more gradients, until the next step."""
        self.hook.stop()
        if self._queue is not None:
            self._queue.stop()

    # -- a step ------------------------------------------------------------------------------

    def __call__(self, body: Body, batch: Any, turn: Turn | None) -> Metrics:
        storage = body.storage
        storage.check_rates()
        self._taps.attach(storage)
        self.stop()
        live = turn is None or turn.live
        weight = self._loss.weigh(batch) if live else 0.0
        replayed: Tensor | None = None
        if weight or turn is None or not turn.replays:
            axes = self.mesh.axes if turn is None or turn.replays or self.ranks == 1 else self._shadowed
            loss, aux, buffers = self._forward(body, batch, weight, axes) if weight else (None, None, body.buffers)
        else:  # with others for whom the model communicates
            replayed, _, buffers = self._forward(body, batch, 0.0, self.mesh.axes)
            loss, aux = None, None
        share = weight if self.hook.by_weight else float(weight > 0)
        if not body.window:
            body.unit = self._units.of_window(storage, weight)
        self.hook.unit = body.unit
        scale = body.outer.scale if self._unscaling is not None else None
        seed = seed_of(loss, share, self.hook, scale, self._accumulate > 1)
        lane = self._lane.values(seed.share, weight, loss, {} if loss is None else user_sums(aux), body.window)
        if not body.window:
            storage.clear_grads()  # a user's own backward pass may have left some
            body.buffers_before, body.batches_before, body.version_before = body.buffers, body.batches, body.version
        if (body.calls + 1) % self._accumulate:  # within a window: nothing is sent
            if loss is not None:
                with self._taps.keeping():
                    self._backward(seed, loss, storage)
            elif replayed is not None:
                with storage.grads_aside(), self._taps.keeping():
                    NOTHING.backward(replayed)
            body.window, body.buffers, body.calls = lane, buffers, body.calls + 1
            body.batches += live
            return Metrics(body.step, False, aux, dict, partial(self.guard.raise_pending, newest=True))

        if self._queue is None:
            settled = self._lane.agree(lane)
            queue = Queue(self.hook.prepare(storage), (self._unscaling or self.hook).launch)
            self._taps.queue = self._queue = queue if settled else None  # no rank has a batch yet: ask again next time
        else:
            queue = self._queue
        lane = self._lane.complete(lane, turn is not None and turn.has_next)
        queue.start(storage.by_bucket)
        self.hook.start(body.hook, storage, lane)
        if self._unscaling is not None:
            self._unscaling.rest = seed.rest
        if loss is not None:
            self._backward(seed, loss, storage)
        elif replayed is not None:
            with queue.muted(storage):
                NOTHING.backward(replayed)
        queue.finish()
        early = self._early
        if early is not None and self.guard.on_host(queue.outgoing) and early.knows_scale():
            sums = self._step_early(early, body, buffers, queue.outgoing, lane, turn)
        else:
            sums = self._step_together(body, buffers, queue.outgoing, lane, turn)
        step = body.step
        body.window = {}
        body.batches += live
        body.calls, body.step = body.calls + 1, body.step + 1
        return Metrics(step, True, aux, partial(Guard.host, sums), partial(self.guard.raise_pending, newest=True))

    def _backward(self, seed: Seed, loss: Tensor, storage: Storage) -> None:
        """The backward pass; until one has reached a parameter, with a check that it does.

        Raises:
            ValueError: it reaches none.
        """
        seed.backward(loss)
        if self._reached:
            return
        queue = self._taps.queue
        taken = queue is not None and any(any(out.taken) for out in queue.outgoing)
        if storage.leaves and not taken and all(leaf.grad is None for leaf in storage.leaves.values()):
            raise ValueError(
                "the loss depends on none of params: no parameter has got a gradient. Does loss_fn call the module itself? Then write "
                "apply, params, buffers = fjoin.functional(module) and call apply(params, buffers, ...) in loss_fn; to leave a "
                "batch out, give it weight 0"
            )
        self._reached = True

    def _forward(
        self, body: Body, batch: Any, weight: float, axes: dict[str, Any]
    ) -> tuple[Tensor, Any, dict[str, Tensor] | None]:
        params = body.rebuild(dict(body.storage.leaves))
        with torch.enable_grad(), bind_axes(axes), bind_weight(weight):
            loss, aux, buffers = self._loss(params, body.buffers, batch)
        if aux is not None or buffers is not None:
            aux, buffers = apart((aux, buffers), body.storage.written(bool(body.window)))
        return loss, aux, buffers

    def _step_together(
        self, body: Body, buffers: Any, outgoing: list[Outgoing], lane: dict[str, Any], turn: Turn | None
    ) -> dict[str, Any]:
        """After all messages: decide whether this step may change anything, and step; the summed lane."""
        hook, sums, divisor = self.hook.finish(body.hook, body.storage, outgoing, lane)
        self._tell(turn, sums)
        verdict = self.guard.judge(body.step, sums, outgoing, divisor, self.hook.clip)
        self._raise_or_count(body, verdict)
        with changing(body):
            if verdict.changes:
                for i, out in enumerate(outgoing):
                    step_bucket(body, i, out, verdict)
            self._run_after(body, buffers, lane["weight"], verdict)
        body.hook = verdict.keep(hook, body.hook)
        return sums

    def _step_early(
        self,
        hook: PlainHook,
        body: Body,
        buffers: Any,
        outgoing: list[Outgoing],
        lane: dict[str, Any],
        turn: Turn | None,
    ) -> dict[str, Any]:
        """Step each bucket as soon as its message is here, behind the lane's; the summed lane."""
        sums = hook.sums()
        self._tell(turn, sums)
        verdict = self.guard.judge(body.step, sums, [], hook.divisor(sums), hook.clip)
        if not verdict.changes:
            for out in outgoing:
                out.arrive()
            self._raise_or_count(body, verdict)
            with changing(body):
                self._run_after(body, buffers, lane["weight"], verdict)
            return sums
        with changing(body):
            for i, out in enumerate(outgoing):
                out.arrive()
                self.guard.look(out)
                error = self.guard.judge(body.step, sums, [out], 1.0, None).error
                if error is not None:
                    for rest in outgoing:
                        rest.arrive()
                    if i == 0:  # nothing has been changed yet
                        body.torn = ""
                    raise error
                step_bucket(body, i, out, verdict)
            self._run_after(body, buffers, lane["weight"], verdict)
        body.hook = hook.state(sums, outgoing)
        return sums

    def _run_after(self, body: Body, buffers: Any, weight: float, verdict: Verdict) -> None:
        """Run the transforms of the new parameters, and of the new buffers: in a step without effect, of those before it."""
        if self.pipeline.after is not None:
            params = {path: leaf.detach() for path, leaf in body.storage.leaves.items()}
            flats = body.storage.flats
            body.after = run_after(self.pipeline.after, self.mesh, params, body.after, flats, weight, verdict)
        if buffers is not None:
            held, weight = verdict.keep(buffers, body.buffers_before), verdict.weight(weight)
            with bind_axes(self.mesh.axes):
                new = self.on_buffers.update(held, body.buffers_state, None, weight=weight, keep_idle=True)
            body.buffers, body.buffers_state = verdict.keep_after(new, (body.buffers_before, body.buffers_state))

    def _tell(self, turn: Turn | None, sums: dict[str, Any]) -> None:
        if turn is not None:
            turn.others = partial(self._has_next, sums)

    def _has_next(self, sums: dict[str, Any]) -> float:
        """How many ranks have another batch."""
        self.guard.attend()
        return Guard.host(sums)["has_next"]

    def _raise_or_count(self, body: Body, verdict: Verdict) -> None:
        if not verdict.changes:
            body.buffers = body.buffers_before
        if verdict.error is not None and self.pipeline.skips is None:
            body.lose_window(body.calls + 1)  # a window that ends like this is lost whole
            raise verdict.error
        if self.pipeline.skips is not None:
            body.outer = verdict.settle(self.pipeline.skips, body.outer)
