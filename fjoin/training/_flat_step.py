"""A step on flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..buckets import GradBuffer, gather_changes_, start_gather
from ..step import StateData, Step, step_buckets
from ..transforms.axes import Work, bind_axes
from ..transforms.pipelines import Effect, Sharding

if TYPE_CHECKING:
    from ._run import Run


class FlatStep(Step):
    """One step on the flat buckets of a state."""

    _run: Run
    _body: StateData
    _gathers: Sequence[Work] = ()  # of parameters, under way

    @property
    def measured(self) -> dict[str, Any]:
        """Numbers of the step that are known by the way: norms, and the counters of steps that are left out."""
        norm, outer = self._decision.norm, self._body.outer
        found: dict[str, Any] = {**self._run.recorded_norms(self._body.hook, self._body.ends.after)}
        if norm is not None:
            found["grad_norm"] = norm
        if self._run.pipeline.skips is not None:
            found["skipped"] = outer.skipped
            if self._run.pipeline.skips.scaled:
                found["loss_scale"] = outer.scale
        return found

    @property
    def of_all(self) -> Callable[[], dict[str, Any]]:
        """A function that waits for the record of all ranks that loop together, and returns it."""
        sums, counts, on_device = self.sums, self._counts, self._run.agreements.check.grads.on_device
        assert sums is not None
        return (lambda: sums) if counts is None else lambda: counts.read(on_device)

    def _refuse(self, error: Exception) -> None:
        self._body.lose_window(self._body.calls + 1)  # a window that ends in this error is lost as a whole
        raise error

    def _step_params(self, outgoing: list[GradBuffer]) -> None:
        """Run the optimizer's kernels on buckets, and begin their gathers."""
        run, body, decision = self._run, self._body, self._decision
        body.torn, storage, self._gathers = True, body.storage, []
        if not decision.changes:
            body.buffers = body.buffers_before
            return
        in_order = reversed(list(enumerate(outgoing)))  # of the forward pass, in which the parameters are gathered
        for index in step_buckets(storage, in_order, decision.divisor, decision.found_inf):
            # Fused kernels do not increment the version: without this a graph that still needs the old values,
            # such as the user's own, would silently use the new ones.
            torch.autograd.graph.increment_version(storage.flats[index])
            if run.gathers_buckets:
                self._start_gather(index)

    def end_buffers(self, buffers: dict[str, Tensor], weight: float) -> None:
        """Take the buffers after the forward pass of a rank of this weight, and transform them."""
        run, body, effect = self._run, self._body, self._decision.effect
        body.buffers = effect.keep(buffers, body.buffers_before)
        if run.on_buffers is not None:
            self._name(run.on_buffers, "buffers")
            with torch.no_grad(), bind_axes(run.mesh.axes):
                call = self._call(weight, effect)
                body.buffers, body.buffers_state = effect.after(run.on_buffers, body.buffers, body.buffers_state, call)

    def _gather(self, sharding: Sharding, effect: Effect) -> None:
        run, storage = self._run, self._body.storage
        if sharding.codec is not None:
            with torch.no_grad():
                self._body.gather = gather_changes_(storage, sharding, run.mesh, self._body.gather, effect)
            return
        if not run.gathers_buckets:
            with torch.no_grad():
                for k in reversed(range(len(storage.layout))):
                    self._start_gather(k)
        for work in self._gathers:
            work.wait()

    def _start_gather(self, index: int) -> None:
        work = start_gather(self._body.storage, index, self._run.mesh)
        if work is not None:
            self._gathers = [*self._gathers, work]
