"""A step in a module's backward pass: the memory of a registered module."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..agreement import Sums, numbers
from ..buckets import gather_leaves
from ..step import CountsOfAll, power_near, run_end
from ..transforms.axes import bind_axes
from ..transforms.base import Call, divisor_of, merge
from ..transforms.pipelines import FLUSH, Agree, Effect, Ends, Gather, Judge, Stages
from ..transforms.reductions import MeanState
from ._buckets import DDPBucket, after_backward, divide
from ._run import ModuleScatter, keep_unused_state

if TYPE_CHECKING:
    from ._hook import DDPRun


class ModuleMemory:
    """One pass of a module: its buckets, whose messages are under way, and the parameters."""

    def __init__(self, run: DDPRun) -> None:
        self._run, self._step = run, run.pipeline_step
        self._begun: Sums | None = None  # the record of the ranks that share gradients, where it is sent first
        self._counts: Sums | None = None  # that of all ranks that loop together, where these are more
        self._found: MeanState | None = None  # the sums of the last reduction
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

    def stages(self, op: Stages) -> bool:
        """`DDPRun` has started the stages already, bucket by bucket, in torch's backward pass."""
        return True

    def observe(self) -> None:
        run, step = self._run, self._step
        by_kernels = run.is_sum and step is not None  # they may divide
        for out in run.outs:
            out.wait()
            if by_kernels and step is not None:
                step.check.grads.observe(out)  # while later messages are still under way
        found = None if run.plan.reduce is None else self._summed()
        if not by_kernels:
            divide(run.outs, self._divisor)
            self._divisor = 1.0
        if run.is_sum:
            self._states = (found,)
        else:
            found = self._finish(found)
        if found is not None:
            self._found = found
            run.total.take(found.total)
        if step is not None and not by_kernels:
            for out in run.outs:
                step.check.grads.observe(out)
        if run.pieces is not None:  # what the buckets hold is no gradient; before an error that ends the pass
            after_backward(self._drop_grads)

    def _finish(self, reduced: MeanState | None) -> MeanState | None:
        """Run the other stages of the hook; returns the sums of the last reduction.

        Args:
            reduced: The sums of a plain reduction before them.
        """
        run = self._run
        count = run.stages.n_early or int(reduced is not None)
        buckets, rest, found = run.stages.finish(run.outs, run.hook_state[count:], run, reduced)
        early: tuple[Any, ...] = () if reduced is None else (reduced,)
        if buckets:
            merged = merge(buckets, run.leaves)
            early = merged if count > 1 else (merged,)
        self._states = (*early, *rest)
        return found

    @property
    def _factor(self) -> float:
        """This rank's factor in a plain reduction."""
        run = self._run
        return run.weight if run.plan.by_weight else float(run.weight > 0)

    def send(self, out: DDPBucket) -> None:
        """Start summing a bucket in place, times its `unit`, or this rank's piece of it: a plain reduction."""
        run, begun = self._run, self._begun
        assert begun is not None
        if out.grads.dtype is torch.float16 and 0 < begun["total"] < math.inf:
            # Weighted sums of gradients would overflow: scale by a power of two near 1 / total, which loses no bit. The
            # host waits for the weights here; bfloat16 has the range of float32.
            out.unit = power_near(begun["total"])
        factor = self._factor * out.unit
        if factor == 0.0:
            out.grads.zero_()  # 0 times NaN is NaN
        elif factor != 1.0:
            out.grads.mul_(factor)
        if out.pieces is not None:
            out.work = ModuleScatter(out, run.mesh.axes[out.pieces.axis])
        else:
            out.work = run.mesh.reduce_(out.grads, run.plan.reduced(run.step).axes)

    def _summed(self) -> MeanState:
        """The sums of a plain reduction, whose gradients are still to be divided."""
        run, begun = self._run, self._begun
        assert begun is not None
        # A hook alone need not know them on the host.
        sums = begun.wait() if self._step is not None else begun.read(run.agreements.check.grads.on_device)
        self._divisor = divisor_of(run.plan.over, sums["total"], run.agreements.of_hook(run.step).ranks)
        names = () if self._step is None else run.values
        lane = {name: torch.tensor(sums[name], dtype=torch.float64) for name in names}
        return MeanState(torch.as_tensor(sums["total"], dtype=torch.float64), lane)

    def _drop_grads(self) -> None:
        for p in self._run.leaves.values():
            p.grad = None

    def agree(self, op: Agree) -> None:
        run, step = self._run, self._step
        if op.moment == "begin" and op.late:
            self._counts = run.agreements.send({"step_id": run.values["step_id"]})
        elif op.moment == "begin" and not op.rides:
            self._begun = run.agreements.record(op.axes).send({"total": self._factor, **run.values})
        elif op.moment == "used" and run.used is not None:
            self._used = run.used.anywhere()
        elif op.moment == "pieces" and step is not None:
            step.check.grads.share(run.outs, run.mesh.axes[op.axes[0]])
        elif op.moment == "verdict":
            self._verdict(op.axes)

    def _verdict(self, axes: tuple[str, ...]) -> None:
        """Agree on the record of ranks whose gradients differ, and so may their decisions."""
        run, step = self._run, self._step
        assert step is not None
        values = {**run.values, "total": run.weight}
        self._sums = numbers(
            step.check.grads.verdict(run.outs, run.agreements.record(axes), values), step.check.reads.now
        )
        run.total.take(torch.tensor(self._sums["weight"] if axes else math.nan, dtype=torch.float64))

    def judge(self, op: Judge) -> Effect:
        run, step = self._run, self._step
        assert step is not None
        reduced = run.plan.reduced(run.step)
        if self._begun is not None:
            self._sums = self._begun.wait()
        elif reduced.equal:
            assert self._found is not None
            record = run.agreements.of_hook(run.step)
            sums = numbers({**self._found.lane, "total": self._found.total}, run.agreements.check.reads.now)
            self._sums = record.once({**sums, "loss": 0.0}, run.values["step_id"])
        counts: Sequence[CountsOfAll] | None = None
        if reduced.axes != run.plan.agree:
            counts = () if self._counts is None else run.agreements.read(run.step, self._counts)
        self._decision, self._ended = step.decide(run.step, run.outs, self._sums, counts)
        effect: Effect = self._decision.effect
        return effect

    def step(self, effect: Effect) -> None:
        run, step, used, decision = self._run, self._step, self._used, self._decision
        assert step is not None
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

    def ends(self, op: Ends, effect: Effect) -> None:
        run, step = self._run, self._step
        assert step is not None
        if self._ended:
            return
        axis = None if run.pieces is None else run.pieces.axis
        call = Call(self._sums["weight"], None, run.step).inside(flush=effect is FLUSH, sharded_over=axis)
        step.ends = run_end(op, step.ends, run.mesh, self._own, step.stepper.states, run.flats, effect, call)

    def gather(self, op: Gather, effect: Effect) -> None:
        run, step, pieces = self._run, self._step, self._run.pieces
        assert step is not None and pieces is not None and step.pipeline.sharding is not None
        if self._ended:
            return
        sharding, own = step.pipeline.sharding, self._own
        with torch.no_grad():
            if sharding.codec is None:
                gather_leaves(pieces, own, run.leaves, run.mesh.axes[op.axis])
                return
            params = {path: p.detach() for path, p in run.leaves.items()}
            slots: Mapping[str, Any] = dict(step.stepper.states)
            with bind_axes(run.mesh.axes):
                new, step.gather_state = sharding.gather(pieces, params, own, slots, step.gather_state)
            torch._foreach_copy_(list(params.values()), list(effect.where(new, params).values()))

    def keep(self, effect: Effect) -> None:
        run = self._run
        new = keep_unused_state(self._used, self._states, run.hook_state, run.leaves)
        run.hook_state = effect.keep(new, run.hook_state)
