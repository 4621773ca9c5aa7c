"""A step in the backward pass of a registered module."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..buckets import GradBuffer, gather_leaves
from ..step import Decision, HookState, Step, after_backward, raise_after_backward
from ..transforms.axes import bind_axes
from ..transforms.base import trees
from ..transforms.pipelines import Effect, Sharding
from ._buckets import divide

if TYPE_CHECKING:
    from ._ddp_run import DDPRun


class ModulePass(Step):
    """One pass of a module, whose parameters stay where they are. Its errors are raised after the backward pass."""

    _run: DDPRun

    def __init__(self, run: DDPRun) -> None:
        super().__init__(run, run.body)
        self.waits = run.pipeline is not None
        self._used: set[str] | None = None  # the parameters that some rank has used; None for all

    def close_pass(self, buckets: list[GradBuffer]) -> None:
        """As `Step.close_pass`; a parameter that no rank has used keeps its part of the hook's state."""
        body, old, paths = self._body, self._body.hook, self._run.leaves
        super().close_pass(buckets)
        used, new = self._used, body.hook
        if used is not None and len(used) < len(paths):
            after, before = (state.whole() if isinstance(state, HookState) else state for state in (new, old))
            kept = trees.merge(
                [trees.restrict(after, paths, used), trees.restrict(before, paths, paths.keys() - used)], paths
            )
            body.hook = new.split(kept) if isinstance(new, HookState) else kept

    def decide(self, buckets: list[GradBuffer]) -> Decision:
        run = self._run
        axes, on_device = run.plan.reduced(self._body.step).axes, run.records.check.grads.on_device
        if run.pieces is not None:  # what the buckets hold is no gradient; before an error that ends the pass
            after_backward(run.drop_grads)
        if (sent := self._begun.get(axes)) is not None:
            found = sent.read(on_device) if self.sums is None else self.sums
            run.total.take(torch.as_tensor(found[run.counts], dtype=torch.float64))
            if run.mixes and run.pipeline is None:
                run.records.ids.check(self._body.step, sent.read(False), 0)
        if run.used is not None:
            self._used = run.used.anywhere()
        if run.error is not None:
            return Decision(Effect(True, False), error=run.error)
        decision = super().decide(buckets)
        if run.pipeline is not None and self._sent.verdict and self.sums is not None:
            run.total.take(torch.tensor(self.sums["weight"] if axes else math.nan, dtype=torch.float64))
        if run.scaling is not None and (missed := run.scaling.take_error()) is not None:
            raise_after_backward(missed)
        return decision

    def _refuse(self, error: Exception) -> None:
        raise_after_backward(error)

    def _step_params(self, buckets: list[GradBuffer]) -> None:
        run, decision = self._run, self._decision
        grads = run.records.check.grads
        steps = decision.effect.steps is not False
        by_kernels = steps and run.divides and self._used is None and grads.readable_without_sync(buckets)
        if not by_kernels:
            divide(buckets, self._total)
        if run.pipeline is None or not steps:
            return
        own, optimizer, used = self._own_leaves(), run.pipeline.optimizer, self._used
        one = optimizer if optimizer.select is None else None
        items = [
            (path, one or optimizer.at(path), own[path], grad)
            for bucket in buckets
            for path, grad in bucket.by_path().items()
            if used is None or path in used
        ]
        scale = decision.total if by_kernels else None
        run.params.stepper.step(items, grad_scale=scale, found_inf=decision.found_inf)

    def _gather(self, sharding: Sharding, effect: Effect) -> None:
        run, held, pieces, own = self._run, self._run.params, self._run.pieces, self._own_leaves()
        assert pieces is not None
        with torch.no_grad():
            if sharding.codec is None:
                gather_leaves(pieces, own, run.leaves, run.mesh.axes[sharding.axis])
                return
            params = {path: p.detach() for path, p in run.leaves.items()}
            with bind_axes(run.mesh.axes):
                new, held.gather = sharding.gather(pieces, params, own, held.optimizer_states(), held.gather)
            torch._foreach_copy_(list(params.values()), list(effect.where(new, params).values()))
