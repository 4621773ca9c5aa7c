"""One step on flat buckets: forward, backward with messages under way, verdict, optimizer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._apply import changing, keep, run_after, step_bucket
from ._axis import Work
from ._guard import Guard, Verdict
from ._hook import HookRun
from ._hook_state import HookState
from ._join import Turn
from ._lane import StepLane
from ._loss import Loss, as_seed, user_sums
from ._mesh import Mesh
from ._metrics import Metrics
from ._state import Body
from ._storage import Storage, apart
from ._taps import Taps
from ._wire import Outgoing, Queue
from .transforms._base import Pipeline
from .transforms._layout import lane_bucket
from .transforms._plan import make_plan
from .transforms.axes._env import bind_axes, bind_weight
from .transforms.sync._lane import lane_dtype
from .transforms.sync._mean import MeanState


class Run:
    """Runs the steps of one pipeline on this rank; `TrainStep` is its public face.

    A hook that begins with `mean` or `sum_over`, and reduces no more behind it, is summed bucket by bucket, in
    place, while backward goes on; any other is run by `HookRun`.
    """

    def __init__(self, loss: Loss, pipeline: Pipeline, mesh: Mesh, accumulate: int, overlap_step: bool = False) -> None:
        self._loss, self.pipeline, self.mesh, self._accumulate = loss, pipeline, mesh, accumulate
        self._plan = plan = make_plan(pipeline.hook, tuple(mesh.shape))
        self.hook = HookRun(pipeline.hook, plan, mesh)
        self.skips = pipeline.spec.name == "skip_if_nonfinite"
        plain = plan.reduce is not None and plan.clip is None and not plan.rest
        self._overlaps = overlap_step and plain and not self.skips
        reduce = self._plan.reduce
        self.weighs = "weight(batch)" if loss.weighs else "1 for each rank with a batch"
        self.axes = plan.axes
        self.ranks = math.prod(axis.size for axis in mesh.over(self.axes))
        self.by_weight = reduce is None or reduce.spec.name == "sum_over" or reduce.spec["over"] == "weight"
        # Gradients travel times a power of two near 1 / ranks, which costs no bit; with equal weights on a
        # power of two of ranks their sum then is the mean already, and no kernel has to divide.
        self._unit = 2.0 ** -math.floor(math.log2(self.ranks)) if reduce else 1.0
        self.guard = Guard(self.ranks, norm=self._plan.clip is not None, skips=self.skips)
        index = 0
        for name in self.axes:
            index = index * mesh.axes[name].size + int(mesh.axes[name].index())
        self._lane = StepLane(mesh, self.axes, self.ranks, index)
        self._queue: Queue | None = None
        self.token = object()  # by which states know the step they belong to, without keeping it alive
        self._taps = Taps()
        self._carrier: Outgoing | None = None  # whose message carries the lane
        self._lane_alone = False  # whether the lane of a plain reduction is a message of its own

    # -- set-up ------------------------------------------------------------------------------

    def init_hook(self, storage: Storage) -> Any:
        if self._plan.reduce is None:
            return self.hook.init(storage)
        params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        return apart(self.pipeline.hook.init(params), storage.flats)

    def close(self) -> None:
        """Free buffers and hooks."""
        self._taps.detach()
        self._taps.queue = self._queue = self._lane.wire = self._carrier = None

    def stop(self) -> None:
        """Take no more gradients, until the next step."""
        self.hook.stop()
        if self._queue is not None:
            self._queue.stop()

    def _prepare(self, storage: Storage) -> Queue:
        """The buffers of the messages."""
        layout = storage.layout
        dtype = lane_dtype(bucket.dtype for bucket in layout)
        words = self._lane.words(dtype)
        carrier = lane_bucket(layout) if self._plan.reduce else None
        outgoing = [Outgoing(bucket, storage.shapes, words if i == carrier else 0) for i, bucket in enumerate(layout)]
        if carrier is not None:
            self._lane.wire = outgoing[carrier].lane
        elif self._hook_carries:
            self._lane.wire = None
        else:
            device = layout[0].device if layout else None
            self._lane.wire = torch.zeros(words, dtype=dtype, device=device)
        self._lane_alone = carrier is None and self._plan.reduce is not None
        self._carrier = None if carrier is None else outgoing[carrier]
        me = weakref.ref(self)  # no cycle: what this step holds must go with it, process groups included

        def launch(index: int, out: Outgoing) -> Work | None:
            run = me()
            assert run is not None
            return run._launch(index, out)

        return Queue(outgoing, launch)

    @property
    def _hook_carries(self) -> bool:
        """Whether a hook that is no plain reduction takes the lane along."""
        return self._plan.reduce is None and self._plan.carries

    def _launch(self, index: int, out: Outgoing) -> Work | None:
        if self._plan.reduce is not None:
            return self.mesh.reduce_(out.wire, self.axes)
        return self.hook.launch(index, out) if self._plan.early is not None else None

    # -- a step ------------------------------------------------------------------------------

    def __call__(self, body: Body, batch: Any, turn: Turn | None) -> Metrics:
        storage = body.storage
        self._taps.attach(storage)
        self.stop()
        live = turn is None or turn.live
        weight = self._loss.weigh(batch) if live else 0.0
        replayed: Tensor | None = None
        if weight or turn is None or not turn.replays:
            loss, aux, buffers = self._forward(body, batch, weight) if weight else (None, None, body.buffers)
        else:  # with others for whom the model communicates
            replayed, _, buffers = self._forward(body, batch, 0.0)
            loss, aux = None, None
        share = weight if self.by_weight else float(weight > 0)
        if loss is not None and loss.dtype.itemsize < 4 and (self._plan.reduce is not None or self._accumulate > 1):
            share = as_seed(share * self._unit, loss.dtype) / self._unit  # the weight that the gradients will have
        lane = self._lane.values(share, weight, loss, {} if loss is None else user_sums(aux), body.window)
        if not body.window:
            storage.clear_grads()  # a user's own backward pass may have left some
        # Seeding with the share makes the weighting free; other hooks weigh by themselves.
        seed = 1.0 if self._plan.reduce is None and self._accumulate == 1 else share * self._unit
        if (body.calls + 1) % self._accumulate:  # within a window: nothing is sent
            if loss is not None:
                with self._taps.keeping():
                    _backward(loss, seed)
            elif replayed is not None:
                kept = {path: leaf.grad for path, leaf in storage.leaves.items()}
                storage.clear_grads()
                with self._taps.keeping():
                    _backward(replayed, 0.0)
                for path, leaf in storage.leaves.items():
                    leaf.grad = kept[path]
            body.window, body.buffers, body.calls = lane, buffers, body.calls + 1
            body.batches += live
            return Metrics(body.step, False, aux, dict, partial(self.guard.raise_pending, newest=True))

        if self._queue is None:
            settled = self._lane.agree(lane)
            queue = self._prepare(storage)
            self._taps.queue = self._queue = queue if settled else None  # no rank has a batch yet: ask again next time
        else:
            queue = self._queue
        lane = self._lane.complete(lane, turn is not None and turn.has_next)
        queue.start(storage.by_bucket)
        alone: Work | None = None
        if self._plan.reduce is None:
            given = lane["total"] if self._accumulate > 1 and lane["total"] else 1.0
            self.hook.start(body.hook, storage, lane["weight"], self._carried(lane), given)
        else:
            assert self._lane.wire is not None
            self._lane.write(lane)
            alone = self.mesh.reduce_(self._lane.wire, self.axes) if self._lane_alone else None
        if loss is not None:
            _backward(loss, seed)
        elif replayed is not None:
            with queue.muted():
                _backward(replayed, 0.0)
        queue.finish()
        if self._overlaps and self.guard.on_host(queue.outgoing):
            sums = self._step_early(body, queue.outgoing, lane, alone, turn)
        else:
            for out in queue.outgoing:
                out.arrive()
                if self._plan.reduce is not None and not self._plan.rest:
                    self.guard.look(out)  # while the messages behind it are still under way
            if alone is not None:
                alone.wait()
            sums = self._step_together(body, queue.outgoing, lane, turn)
        step = body.step
        body.buffers, body.window = buffers, {}
        body.batches += live
        body.calls, body.step = body.calls + 1, body.step + 1
        return Metrics(step, True, aux, partial(Guard.host, sums), partial(self.guard.raise_pending, newest=True))

    def _forward(self, body: Body, batch: Any, weight: float) -> tuple[Tensor, Any, dict[str, Tensor] | None]:
        params = body.rebuild(dict(body.storage.leaves))
        with torch.enable_grad(), bind_axes(self.mesh.axes), bind_weight(weight):
            return self._loss(params, body.buffers, batch)

    def _step_together(
        self, body: Body, outgoing: list[Outgoing], lane: dict[str, Any], turn: Turn | None
    ) -> dict[str, Any]:
        """After all messages: decide whether this step may change anything, and step; the summed lane."""
        hook: Any = None
        if self._plan.reduce is None:
            hook, sums = self._finish_hook(body, outgoing, lane)
            divisor: Any = 1.0
        else:
            assert self._lane.wire is not None
            sums = self.guard.read_lane(self._lane.wire, self._lane.names)
            divisor = self._divisor(sums)
            hook = self._reduced_state(sums, divisor)
            divisor = divisor * self._unit
            if self._plan.rest:
                hook = self._run_rest(body, outgoing, hook(), divisor)
                divisor = 1.0
        self._tell(turn, sums)
        verdict = self.guard.judge(body.step, sums, outgoing, divisor, self._plan.clip)
        self._raise_or_count(body, verdict)
        if verdict.changes:
            with changing(body):
                for i, out in enumerate(outgoing):
                    step_bucket(body, i, out, verdict)
                run_after(self.pipeline.after, self.mesh, body, lane["weight"], verdict)
        # Host counters go on in a step that changes nothing: they say what has been called.
        found_inf = verdict.found_inf if verdict.changes else torch.ones(())
        body.hook = hook if found_inf is None else keep(found_inf, hook, body.hook)
        return sums

    def _finish_hook(
        self, body: Body, outgoing: list[Outgoing], lane: dict[str, Any]
    ) -> tuple[HookState, dict[str, Any]]:
        """Run what is left of a hook that is no plain reduction; its new state and the summed lane."""
        hook = self.hook.finish(body.hook, body.storage, outgoing, lane["weight"], self._carried(lane))
        for out in outgoing:
            self.guard.look(out)
        if self._hook_carries:
            carried = self.hook.sums(hook)
            return hook, self.guard.from_tensors({**carried.lane, "total": carried.total})
        # The ranks' gradients differ, so each says whether its own are finite.
        wire = self._lane.wire
        assert wire is not None
        self._lane.write(self._lane.mark(lane, self.guard.bad(outgoing)))
        self.mesh.reduce_(wire, self.axes).wait()
        return hook, self.guard.read_lane(wire, self._lane.names)

    def _carried(self, lane: dict[str, Any]) -> dict[str, Any] | None:
        """What a hook that is no plain reduction takes along."""
        return {name: v for name, v in lane.items() if name != "total"} if self._hook_carries else None

    def _run_rest(self, body: Body, outgoing: list[Outgoing], first: tuple[MeanState, ...], divisor: Any) -> Any:
        """Run the stages behind the reduction on all gradients."""
        for out in outgoing:
            out.grads.div_(torch.where(divisor == 0, 1.0, divisor) if isinstance(divisor, Tensor) else divisor or 1.0)
        old = body.hook_state()[1:]
        new = self.hook.run(self._plan.rest, old, body.storage, outgoing, first[0].total, None)
        for out in outgoing:
            self.guard.look(out)
        return (*first, *new)

    def _step_early(
        self, body: Body, outgoing: list[Outgoing], lane: dict[str, Any], alone: Work | None, turn: Turn | None
    ) -> dict[str, Any]:
        """Step each bucket as soon as its message is here, behind the lane's; the summed lane."""
        if alone is not None:
            alone.wait()
        if self._carrier is not None:
            self._carrier.arrive()
        assert self._lane.wire is not None
        sums = self.guard.read_lane(self._lane.wire, self._lane.names)
        self._tell(turn, sums)
        divisor = self._divisor(sums)
        verdict = self.guard.judge(body.step, sums, [], divisor * self._unit, None)
        if not verdict.changes:
            for out in outgoing:
                out.arrive()
            self._raise_or_count(body, verdict)
            return sums
        with changing(body):
            for i, out in enumerate(outgoing):
                out.arrive()
                self.guard.look(out)
                error = self.guard.judge(body.step, sums, [out], divisor, None).error
                if error is not None:
                    for rest in outgoing:
                        rest.arrive()
                    if i == 0:  # nothing has been changed yet
                        body.torn = ""
                    raise error
                step_bucket(body, i, out, verdict)
            run_after(self.pipeline.after, self.mesh, body, lane["weight"], verdict)
        body.hook = self._reduced_state(sums, divisor)
        return sums

    def _tell(self, turn: Turn | None, sums: dict[str, Any]) -> None:
        if turn is not None:
            turn.others = lambda: Guard.host(sums)["has_next"]

    def _raise_or_count(self, body: Body, verdict: Verdict) -> None:
        if verdict.error is not None and not self.skips:
            body.window, body.calls = {}, body.calls + 1  # a window that ends like this is lost whole
            raise verdict.error
        if body.skipped is not None:
            body.skipped += int(verdict.error is not None) if verdict.found_inf is None else verdict.found_inf.long()

    def _divisor(self, sums: dict[str, Any]) -> Any:
        """What the sums are to be divided by."""
        reduce = self._plan.reduce
        if reduce is None or reduce.spec.name == "sum_over":
            return 1.0
        return float(self.ranks) if reduce.spec["over"] == "world" else sums["total"]

    def _reduced_state(self, sums: dict[str, Any], divisor: Any) -> Callable[[], Any]:
        """The state that the pure hook would have after these messages, made when it is asked for."""
        reduce, clip, rest = self._plan.reduce, self._plan.clip, self._plan.rest
        assert reduce is not None
        total = sums["total"] if reduce.spec.name == "sum_over" else divisor

        def wide(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64)

        def make() -> Any:  # holds nothing of this object, which a state must not keep alive
            state = MeanState(wide(total), {n: wide(v) for n, v in sums.items() if n != "total"})
            return (state, ()) if clip is not None else (state,) if rest else state

        return make


def _backward(loss: Tensor, seed: float) -> None:
    loss.backward(None if seed == 1.0 else torch.full_like(loss, seed))
