"""The end of a step: decision, optimizer, and the transforms of parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..groups._mesh import Mesh
from ..reducer._all_reduce import AllReduceHook
from ..reducer._bucket_hooks import StepHook
from ..reducer._buckets import GradBuffer
from ..reducer._gather_pieces import gather_changes_, start_gather
from ..reducer._late_counts import LateCounts
from ..reducer._step_check import Decision, StepCheck
from ..transforms._axis_env import bind_axes
from ..transforms._call import Call
from ..transforms._transform import Transform
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.program._effect import FLUSH, Effect
from ._apply import changing, run_ends, step_bucket
from ._deferred import DeferredMessages
from ._state import StateData


class EndOfStep:
    """Ends the steps of one pipeline on this rank, once its messages have been sent."""

    def __init__(
        self, pipeline: Pipeline, mesh: Mesh, hook: StepHook, step_check: StepCheck, on_buffers: Transform,
        deferred: DeferredMessages, overlap_gather: bool,
    ) -> None:  # fmt: skip
        self._pipeline, self._mesh, self._hook, self._step_check = pipeline, mesh, hook, step_check
        self._on_buffers = on_buffers
        self.late_counts = LateCounts((*pipeline.ends, on_buffers), mesh.shape, step_check.check_step)
        sharding, self._overlap_gather = pipeline.sharding, overlap_gather
        # Whether each bucket's gather begins once it has been stepped.
        self._gathers_buckets = sharding is not None and sharding.codec is None and pipeline.after is None
        overlaps = pipeline.after is not None and pipeline.after.accepts("prefetch") and mesh.device.type == "cpu"
        self._deferred = deferred if overlaps and deferred.travel else None

    def together(
        self,
        body: StateData,
        buffers: Any,
        outgoing: list[GradBuffer],
        lane: dict[str, Any],
        counts_of_all: Callable[[], dict[str, Any]] | None,
    ) -> dict[str, Any]:
        """Wait for all messages, decide whether this step may change anything, and step; returns the summed lane.

        Args:
            lane: The values of this rank.
            counts_of_all: Waits for the lane of all ranks that loop together, where the hook's messages do not carry it.
                Some steps leave it to the next one; see `LateCounts`.
        """
        hook, sums, divisor = self._hook.finish(body.hook, body.storage, outgoing, lane)
        counts = None if counts_of_all is None else self.late_counts.read(body.step, counts_of_all)
        decision = self._step_check.decide(body.step, sums, outgoing, divisor, self._hook.clip, counts)
        self._raise_or_count(body, decision)
        with changing(body):
            if decision.changes:
                # In the order of the forward pass, in which the parameters are gathered.
                for i, out in reversed(list(enumerate(outgoing))):
                    step_bucket(body, i, out, decision)
                    if self._gathers_buckets:
                        start_gather(body.storage, i, self._mesh)
            self._run_after(body, buffers, lane["weight"], sums, decision)
        body.hook = decision.effect.keep(hook, body.hook)
        return sums

    def bucket_by_bucket(
        self,
        hook: AllReduceHook,
        body: StateData,
        buffers: Any,
        outgoing: list[GradBuffer],
        lane: dict[str, Any],
    ) -> dict[str, Any]:
        """Wait for the lane, then step each bucket as soon as its message has arrived; returns the summed lane."""
        sums = hook.sums()
        decision = self._step_check.decide(body.step, sums, [], hook.divisor(sums), hook.clip)
        if not decision.changes:
            for out in outgoing:
                out.wait()
            self._raise_or_count(body, decision)
            with changing(body):
                self._run_after(body, buffers, lane["weight"], sums, decision)
            return sums
        with changing(body):
            for i, out in enumerate(outgoing):
                out.wait()
                self._step_check.observe(out)
                error = self._step_check.decide(body.step, sums, [out], 1.0, None).error
                if error is not None:
                    for rest in outgoing:
                        rest.wait()
                    if i == 0:  # nothing has been changed yet
                        body.torn = ""
                    raise error
                step_bucket(body, i, out, decision)
            self._run_after(body, buffers, lane["weight"], sums, decision)
        body.hook = hook.state(sums, outgoing)
        return sums

    def _run_after(
        self, body: StateData, buffers: Any, weight: float, sums: dict[str, Any], decision: Decision
    ) -> None:
        """Transform the new parameters and the new buffers.

        Args:
            weight: This rank's weight, for the transform of its buffers. The transform of the parameters gets the sum
                of the weights of all ranks that share the gradients.
        """
        effect = decision.effect
        prefetch = None
        if self._deferred is not None:
            self._deferred.advance()
            prefetch = self._deferred if effect.raises is False else None
        self._run_ends(body, effect, Call(sums["weight"], None, body.step).inside(prefetch=prefetch))
        self._gather(body, effect)
        if buffers is not None:
            held = effect.keep(buffers, body.buffers_before)
            with bind_axes(self._mesh.axes):
                call = Call(weight, None, body.step)
                body.buffers, body.buffers_state = effect.after(self._on_buffers, held, body.buffers_state, call)

    def _run_ends(self, body: StateData, effect: Effect, call: Call) -> None:
        pipeline, storage = self._pipeline, body.storage
        if pipeline.ends:
            params = storage.own_leaves()
            states = storage.optimizer_states() if storage.has_masters or pipeline.on_state else {}
            body.after, body.on_state = run_ends(
                pipeline, self._mesh, params, states, (body.after, body.on_state), [*storage.flats, *storage.exact], effect,
                call,
            )  # fmt: skip

    def flush(self, body: StateData) -> None:
        """Run now the transforms that would run in later steps."""
        with changing(body):
            call = Call(0.0, None, body.step).inside(flush=True)
            self._run_ends(body, FLUSH, call.inside(prefetch=self._deferred))
            self._gather(body, FLUSH)
            if body.buffers is not None:
                with bind_axes(self._mesh.axes):
                    body.buffers, body.buffers_state = FLUSH.after(
                        self._on_buffers, body.buffers, body.buffers_state, call
                    )

    def _gather(self, body: StateData, effect: Effect) -> None:
        """Give all ranks the parameters that each of them has stepped."""
        sharding, storage = self._pipeline.sharding, body.storage
        effect = effect.at_end if self._pipeline.after else effect
        if sharding is not None and effect.steps is not False:
            if sharding.codec is None:
                if not self._gathers_buckets:
                    for k in reversed(range(len(storage.layout))):
                        start_gather(storage, k, self._mesh)
                if not self._overlap_gather:
                    storage.arrivals.wait()
            else:
                body.gather = gather_changes_(storage, sharding, self._mesh, body.gather, effect)

    def _raise_or_count(self, body: StateData, decision: Decision) -> None:
        if not decision.changes:
            body.buffers = body.buffers_before
        if decision.error is not None and self._pipeline.skips is None:
            body.lose_window(body.calls + 1)  # a window that ends in this error is lost as a whole
            raise decision.error
        if self._pipeline.skips is not None:
            body.outer = decision.effect.update_counters(self._pipeline.skips, body.outer)
