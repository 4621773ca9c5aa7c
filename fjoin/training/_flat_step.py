"""A step on flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..buckets import GradBuffer, Storage, gather_changes_, start_gather
from ..step import StateData, Step
from ..transforms.axes import Work, bind_axes
from ..transforms.base import trees
from ..transforms.optimizers import age_of, step_in_place, stepped_together, unchecked
from ..transforms.pipelines import Effect, Sharding

if TYPE_CHECKING:
    from ._run import Run


class FlatStep(Step):
    """One step on the flat buckets of a state.

    Attributes:
        buffers: Those after the forward pass, None without buffers, and the weight of this rank.
    """

    buffers: tuple[dict[str, Tensor] | None, float] = None, 0.0
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
        sums, counts, on_device = self.sums, self._counts, self._run.records.check.grads.on_device
        assert sums is not None
        return (lambda: sums) if counts is None else lambda: counts.read(on_device)

    def _refuse(self, error: Exception) -> None:
        self._body.lose_window(self._body.calls + 1)  # a window that ends in this error is lost as a whole
        raise error

    def _step_params(self, buckets: list[GradBuffer]) -> None:
        """Run the optimizer's kernels on buckets, and begin their gathers."""
        run, body, decision = self._run, self._body, self._decision
        buffers, weight = self.buffers
        if buffers is not None:  # before the kernels: where its message fails, the state is that of the step before
            self.end_buffers(buffers, weight)
        body.torn, storage, self._gathers = True, body.storage, []
        if decision.effect.steps is False:
            return
        in_order = reversed(list(enumerate(buckets)))  # of the forward pass, in which the parameters are gathered
        for index in step_buckets(storage, in_order, decision.total, decision.found_inf):
            # Fused kernels do not increment the version: without this a graph that still needs the old values,
            # such as the user's own, would silently use the new ones.
            torch.autograd.graph.increment_version(storage.flats[index])
            if run.gathers_buckets:
                self._start_gather(index)

    def end_buffers(self, buffers: dict[str, Tensor], weight: float) -> None:
        """Take the buffers after the forward pass of a rank of this weight, and transform them."""
        run, body, effect = self._run, self._body, self._decision.effect
        new, state = effect.keep(buffers, body.buffers_before), body.buffers_state
        if run.on_buffers is not None:
            self._name(run.on_buffers, "buffers")
            with torch.no_grad(), bind_axes(run.mesh.axes):
                new, state = effect.after(run.on_buffers, new, state, self._call(weight, effect))
        body.buffers, body.buffers_state = new, state

    @torch.no_grad()
    def _gather(self, sharding: Sharding, effect: Effect) -> None:
        run, storage = self._run, self._body.storage
        if sharding.codec is not None:
            self._body.gather = gather_changes_(storage, sharding, run.mesh, self._body.gather, effect)
            return
        if not run.gathers_buckets:
            for k in reversed(range(len(storage.layout))):
                self._start_gather(k)
        for work in self._gathers:
            work.wait()

    def _start_gather(self, index: int) -> None:
        work = start_gather(self._body.storage, index, self._run.mesh)
        if work is not None:
            self._gathers = [*self._gathers, work]


def step_buckets(
    storage: Storage, buckets: Iterable[tuple[int, GradBuffer]], grad_scale: Tensor | None, found_inf: Tensor | None
) -> Iterator[int]:
    """Step buckets, and yield the number of each once it has been stepped.

    On the CPU a bucket is stepped at a time, whose gradients may be in the cache. On an accelerator one kernel steps
    all parameters of one optimizer: there a step of many buckets is bound by the host, which launches kernels.

    Args:
        buckets: (number of the bucket, its gradients).
        grad_scale, found_inf: See `Optimizer`.
    """
    if not storage.together:
        for index, bucket in buckets:
            with torch.no_grad():
                for part, param, grad, slots in storage.ranges(index, bucket.grads):
                    unchecked(part.step_param_)(param, grad, slots, grad_scale=grad_scale, found_inf=found_inf)
            yield index
        return
    found = [(index, storage.ranges(index, bucket.grads)) for index, bucket in buckets]
    items = [(slots, part, param, grad) for _, some in found for part, param, grad, slots in some]
    with torch.no_grad():
        for group in stepped_together(items, [age_of(part, trees.fields(slots)) for slots, part, _, _ in items]):
            states, parts, params, grads = map(list, zip(*group, strict=True))
            step_in_place(parts[0], params, grads, states, grad_scale=grad_scale, found_inf=found_inf)
    yield from (index for index, _ in found)
