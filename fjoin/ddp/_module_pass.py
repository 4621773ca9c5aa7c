"""A step in the backward pass of a registered module."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..agreement import Sums, numbers
from ..buckets import gather_leaves
from ..groups import Span
from ..step import CountsOfAll, run_end, totals_in
from ..transforms.axes import bind_axes
from ..transforms.base import Call, Totals, Transform, merge
from ..transforms.pipelines import FLUSH, Effect, Sharding
from ._buckets import DDPBucket, after_backward, divide
from ._run import ModuleScatter, ModuleStep, keep_unused_state

if TYPE_CHECKING:
    from ._hook import DDPRun


class ModulePass:
    """One pass of a module: its buckets, whose messages are under way, and the parameters.

    Attributes:
        begun: By axes, the records that are sent before the gradients.
    """

    def __init__(self, run: DDPRun) -> None:
        self._run, self._step = run, run.pipeline_step
        self._records = run.agreements.records(run.step)
        self.begun: dict[tuple[str, ...], Sums] = {}
        self._counts: Sums | None = None  # that of all ranks that loop together, where these are more
        self._states: tuple[Any, ...] = run.hook_state
        self._sums: dict[str, Any] = {"weight": 0.0}  # the record
        self._used: set[str] | None = None
        self._divisor: Any = 1.0
        self._decision: Any = None
        self._ended = False  # with an error, which is raised after the backward pass

    @functools.cached_property
    def _own(self) -> dict[str, Tensor]:
        """Path -> the values that this rank steps. Some are copies, which the gather gives to the parameters."""
        assert self._step is not None
        return self._step.own()

    def begin(self) -> None:
        """Send what goes before the gradients. `DDPRun` then starts the stages, bucket by bucket, in torch's backward pass."""
        run = self._run
        for axes in self._records.before:
            self.begun[axes] = run.agreements.record(axes).send(run.values)
        if self._records.apart:
            self._counts = run.agreements.send({"step_id": run.values["step_id"]})

    def close(self, span: Span | None) -> None:
        """Complete the pass, whose buckets have all come: the hook's other stages, and the step."""
        run, step, records = self._run, self._step, self._records
        if span is not None:
            span.next("wait for gradients")
        self._observe()
        if run.used is not None:
            self._used = run.used.anywhere()
        effect = Effect(True)
        if step is not None:
            if span is not None:
                span.next("agree: verdict")
            if records.pieces is not None:
                step.check.grads.share(run.outs, run.mesh.axes[records.pieces])
            if records.verdict:
                self._verdict(run.plan.reduced(run.step).axes)
            effect = self._judge(step)
            if span is not None:
                span.next("optimizer")
            self._step_params(step)
            self.end(effect)
        if span is not None:
            span.next("states")
        new = keep_unused_state(self._used, self._states, run.hook_state, run.leaves)
        run.hook_state = effect.keep(new, run.hook_state)

    def _observe(self) -> None:
        run, step = self._run, self._step
        by_kernels = run.is_sum and step is not None  # they may divide
        for out in run.outs:
            out.wait()
            if by_kernels and step is not None:
                step.check.grads.observe(out)  # while later messages are still under way
        reduced = None if run.plan.reduce is None else self._divide_by()
        if not by_kernels:
            divide(run.outs, self._divisor)
            self._divisor = 1.0
        self._states = ((),) if run.is_sum else self._finish(reduced)
        if (sums := self.begun.get(run.plan.reduced(run.step).axes)) is not None:
            found = sums.read(run.agreements.check.grads.on_device)
            run.total.take(torch.as_tensor(found[run.counts], dtype=torch.float64))
        if step is not None and not by_kernels:
            for out in run.outs:
                step.check.grads.observe(out)
        if run.pieces is not None:  # what the buckets hold is no gradient; before an error that ends the pass
            after_backward(self._drop_grads)

    def _finish(self, reduced: tuple[tuple[str, ...], Totals] | None) -> tuple[Any, ...]:
        """Run the other stages of the hook; returns the states of all.

        Args:
            reduced: The axes of a plain reduction before them, and the sums of the weights over these.
        """
        run = self._run
        count = run.stages.n_early or int(reduced is not None)
        buckets, rest = run.stages.finish(run.outs, run.hook_state[count:], run, reduced)
        early: tuple[Any, ...] = () if reduced is None else run.hook_state[:1]
        if buckets:
            merged = merge(buckets, run.leaves)
            early = merged if count > 1 else (merged,)
        return (*early, *rest)

    @property
    def _record(self) -> Sums:
        """The record of the ranks that share gradients, sent before these."""
        return self.begun[self._run.plan.reduced(self._run.step).axes]

    def send(self, out: DDPBucket) -> None:
        """Start summing a bucket in place, times its `unit`, or this rank's piece of it: a plain reduction."""
        run = self._run
        if out.grads.dtype is torch.float16:
            total = run.plan.divisor(self._record.wait(), run.agreements.of_hook(run.step).ranks)
            if 0 < total < math.inf:
                out.unit = 1 / total  # sums of weight * gradient would not fit; the host waits for the weights here
        factor = run.plan.counted(run.weight) * out.unit
        if factor == 0.0:
            out.grads.zero_()  # 0 times NaN is NaN
        elif factor != 1.0:
            out.grads.mul_(factor)
        if out.pieces is not None:
            out.work = ModuleScatter(out, run.mesh.axes[out.pieces.axis])
        else:
            out.work = run.mesh.reduce_(out.grads, run.plan.reduced(run.step).axes)

    def _divide_by(self) -> tuple[tuple[str, ...], Totals]:
        """Find the divisor of a plain reduction; returns its axes, and the sums of the weights over these."""
        run = self._run
        axes = run.plan.reduced(run.step).axes
        record = self.begun[axes]
        # A hook alone need not know them on the host.
        sums = record.wait() if self._step is not None else record.read(run.agreements.check.grads.on_device)
        self._divisor = run.plan.divisor(sums, run.agreements.record(axes).ranks)
        return axes, totals_in(sums)

    def _drop_grads(self) -> None:
        for p in self._run.leaves.values():
            p.grad = None

    def _verdict(self, axes: tuple[str, ...]) -> None:
        """Agree on the record of ranks whose gradients differ, and so may their decisions."""
        run, step = self._run, self._step
        assert step is not None
        values = dict(run.values)
        self._sums = numbers(
            step.check.grads.verdict(run.outs, run.agreements.record(axes), values), step.check.reads.now
        )
        run.total.take(torch.tensor(self._sums["weight"] if axes else math.nan, dtype=torch.float64))

    def _judge(self, step: ModuleStep) -> Effect:
        run = self._run
        reduced = run.plan.reduced(run.step)
        if reduced.equal:
            self._sums = self._record.wait()
        counts: Sequence[CountsOfAll] | None = None
        if reduced.axes != run.plan.agree:
            counts = () if self._counts is None else run.agreements.read(run.step, self._counts)
        self._decision, self._ended = step.decide(run.step, run.outs, self._sums, counts)
        effect: Effect = self._decision.effect
        return effect

    def _step_params(self, step: ModuleStep) -> None:
        run, used, decision = self._run, self._used, self._decision
        scale = None
        if step.by_kernels(decision, run.outs, used) and self._divisor != 1.0:
            scale = torch.tensor(self._divisor, dtype=torch.float64)
        else:
            divide(run.outs, self._divisor)
        if not decision.changes or self._ended:
            return
        own, at = self._own, step.pipeline.optimizer.at
        items = [
            (path, at(path), own[path], grad)
            for out in run.outs
            for path, grad in out.by_path().items()
            if used is None or path in used
        ]
        step.stepper.step(items, grad_scale=scale, found_inf=decision.found_inf)

    def end(self, effect: Effect) -> None:
        """Transform the parameters and the optimizer's state at the end of a step, and gather the parameters."""
        step = self._step
        assert step is not None
        if self._ended:
            return
        pipeline = step.pipeline
        if pipeline.after is not None:
            self._transform(step, pipeline.after, "params", effect)
        if pipeline.on_state is not None:
            self._transform(step, pipeline.on_state, "optimizer", effect)
        if pipeline.sharding is not None:
            # A transform of the parameters may have changed them in a step without effect too.
            gathered = effect if pipeline.after is None else effect.at_end
            if gathered.steps is not False:
                self._gather(step, pipeline.sharding, gathered)

    def _transform(self, step: ModuleStep, part: Transform, on: Literal["params", "optimizer"], effect: Effect) -> None:
        run = self._run
        axis = None if run.pieces is None else run.pieces.axis
        call = Call(self._sums["weight"], run.step).inside(flush=effect is FLUSH, sharded_over=axis)
        step.ends = run_end(part, on, step.ends, run.mesh, self._own, step.stepper.states, run.flats, effect, call)

    def _gather(self, step: ModuleStep, sharding: Sharding, effect: Effect) -> None:
        run, pieces, own = self._run, self._run.pieces, self._own
        assert pieces is not None
        with torch.no_grad():
            if sharding.codec is None:
                gather_leaves(pieces, own, run.leaves, run.mesh.axes[sharding.axis])
                return
            params = {path: p.detach() for path, p in run.leaves.items()}
            slots: Mapping[str, Any] = dict(step.stepper.states)
            with bind_axes(run.mesh.axes):
                new, step.gather_state = sharding.gather(pieces, params, own, slots, step.gather_state)
            torch._foreach_copy_(list(params.values()), list(effect.where(new, params).values()))
