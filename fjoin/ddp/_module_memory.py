"""A step in a module's backward pass: the memory of a registered module."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..groups._mesh import Mesh
from ..reducer._bucket_call import BucketCall
from ..reducer._gather_pieces import gather_leaves
from ..reducer._tree_stages import last_sums, run_stages
from ..training._apply import end_on_optimizer, end_on_params
from ..transforms._axis_env import bind_axes
from ..transforms._bucketwise import merge
from ..transforms._call import Call
from ..transforms._transform import Transform
from ..transforms.combinators._chain import behind_all, stages
from ..transforms.layout._pieces import Pieces
from ..transforms.plan._plan import Plan
from ..transforms.program._effect import FLUSH, Effect
from ..transforms.program._ops import Agree, Ends, Gather, Judge, Stages, StepEach
from ..transforms.reductions._reduction import MeanState
from ._buckets import DDPBucket, divide
from ._late_errors import after_backward
from ._module_step import ModuleStep
from ._unused_params import UsedParameters, keep_unused_state
from ._weighted_sum import WeightedSum


class Pass(Protocol):
    """The part of a `DDPRun` that its memories use."""

    leaves: dict[str, Tensor]
    flats: list[Tensor]
    pieces: Pieces | None
    pipeline_step: ModuleStep | None
    hook_state: tuple[Any, ...]
    step: int
    total: float
    mesh: Mesh
    plan: Plan
    parts: list[Transform]  # the stages of the hook
    weight: float
    outs: list[DDPBucket]
    calls: list[BucketCall]
    sum: WeightedSum | None
    used: UsedParameters | None
    bare: bool
    transforms: bool

    def first_call(self) -> Call: ...


class ModuleMemory:
    """One pass of a module: its buckets, whose messages are under way, and the parameters."""

    def __init__(self, run: Pass) -> None:
        self._run, self._step = run, run.pipeline_step
        self._found: MeanState | None = None  # the sums of the last reduction
        self._states: tuple[Any, ...] = run.hook_state
        self._sums: dict[str, Any] = {"weight": 0.0}
        self._used: set[str] | None = None
        self._divisor = 1.0
        self._decision: Any = None
        self._ended = False  # with an error, which is raised after the backward pass

    @functools.cached_property
    def _own(self) -> dict[str, Tensor]:
        """Path -> the values that this rank steps. Some are copies, which the gather gives to the parameters."""
        assert self._step is not None
        return self._step.own()

    def stages(self, op: Stages) -> bool:
        """The messages of all buckets are under way; see `DDPRun`."""
        return True

    def observe(self) -> None:
        run, plan, step = self._run, self._run.plan, self._step
        for out in run.outs:
            out.wait()
            if run.bare and step is not None:
                step.check.observe(out)  # while later messages are still under way
        new: tuple[Any, ...] = ()
        if plan.reduce is not None:
            self._found = self._summed()
            new = (self._found,)
        elif run.calls:
            new, self._found = self._called()
        if not run.bare:
            divide(run.outs, self._divisor)
            self._divisor = 1.0
        states = run.hook_state[len(new) :]
        if rest := run.parts[len(new) :]:
            call = run.first_call()
            if new:
                call = behind_all(run.parts[: len(new)], new if len(new) > 1 else new[0], call)
            states = run_stages(rest, states, run, run.outs, run.mesh, call)
            self._found = last_sums(rest, states) or self._found
        if self._found is not None:
            run.total = float(self._found.total)
        self._states = (*new, *states)
        if step is not None and not run.bare:
            for out in run.outs:
                step.check.observe(out)
        if run.pieces is not None:  # what the buckets hold is no gradient; before an error that ends the pass
            after_backward(self._drop_grads)

    def _summed(self) -> MeanState:
        """The sums of a plain reduction, whose gradients are still to be divided."""
        run, sums = self._run, self._run.sum
        assert sums is not None
        total, over = sums.total, run.plan.over
        self._divisor = 1.0 if over is None else float(sums.ranks) if over == "world" else total
        lane = {"weight": torch.tensor(sums.weight, dtype=torch.float64)} if run.transforms else {}
        return MeanState(torch.tensor(total, dtype=torch.float64), lane)

    def _called(self) -> tuple[tuple[Any, ...], MeanState | None]:
        """The states of the stages that ran bucket by bucket, and the sums of the last of them that reduces."""
        early = self._run.plan.early
        assert early is not None
        states = [call.state for call in self._run.calls]
        merged = merge(states, self._run.leaves)
        new = merged if len(stages(early)) > 1 else (merged,)
        return new, early.sums(states[0]) if early.sums is not None else None

    def _drop_grads(self) -> None:
        for p in self._run.leaves.values():
            p.grad = None

    def agree(self, op: Agree) -> None:
        run, step = self._run, self._step
        if op.moment == "used" and run.used is not None:
            self._used = run.used.anywhere()
        elif op.moment == "pieces" and step is not None:
            step.check.share(run.outs, run.mesh.axes[op.axes[0]])

    def judge(self, op: Judge) -> Effect:
        run, step = self._run, self._step
        assert step is not None
        if run.plan.reduced(run.step).equal:
            assert self._found is not None
            total = float(self._found.total)
            self._sums = {"weight": float(self._found.lane["weight"]) if run.transforms else total}
        else:  # the ranks' gradients differ, and so may their decisions
            self._sums = step.verdict(run.step, run.outs, run.weight)
            run.total = self._sums["weight"] if run.plan.reduced(run.step).axes else math.nan
        self._sums.update(total=self._sums["weight"], loss=0.0)
        counts = step.counts_of(run.step)
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

    def step_each(self, op: StepEach) -> Effect:
        raise NotImplementedError("a module's parameters are stepped after its last bucket")

    def ends(self, op: Ends, effect: Effect) -> None:
        run, step = self._run, self._step
        if self._ended or step is None:
            return
        call = Call(self._sums["weight"], None, run.step).inside(flush=effect is FLUSH)
        own, states = self._own, step.stepper.states
        with torch.no_grad():
            if op.on == "params":
                step.after_state = end_on_params(
                    run.mesh, op.part, own, states, step.after_state, run.flats, effect, call
                )
            else:
                step.on_state = end_on_optimizer(run.mesh, op.part, own, states, step.on_state, effect, call)

    def gather(self, op: Gather, effect: Effect) -> None:
        run, step, pieces = self._run, self._step, self._run.pieces
        if self._ended or step is None or pieces is None or step.pipeline.sharding is None:
            return
        sharding, own = step.pipeline.sharding, self._own
        effect = effect.at_end if step.pipeline.after else effect
        if effect.steps is False:
            return
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
