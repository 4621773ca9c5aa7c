"""Our hooks and pipelines as the communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from .._errors import CollectiveTimeout, PeerLost
from ..groups._consistency import same_step
from ..groups._mesh import Mesh
from ..optim._foreach import ForeachStepper, divides
from ..reducer._bucket_hooks import Call
from ..reducer._flat_params import copy_if_aliased
from ..reducer._interleave import Interleaver, travel
from ..reducer._side_stream import SideStream
from ..reducer._step_check import StepCheck
from ..reducer._tree_stages import last_sums, run_stages
from ..training._apply import run_after
from ..training._loss_weight import unscale
from ..transforms._axis_env import bind_axes, bound
from ..transforms._bucketwise import merge, restrict
from ..transforms._transform import Transform, donate_kwargs
from ..transforms._tree import check_dense
from ..transforms.combinators._chain import stages
from ..transforms.pipelines._explain import explain_cut
from ..transforms.pipelines._explanation import Explanation
from ..transforms.pipelines._loss_scale import refuse_float16
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.plan._plan import make_plan
from ..transforms.reductions._mean import MeanState
from ._buckets import DDPBucket, divide, first_buckets
from ._late_errors import raise_after_backward
from ._loss_scale import ScaledLoss
from ._unused_params import UsedParameters, keep_unused_state
from ._weighted_sum import Counts, WeightedSum


class DDPRun:
    """Runs a hook or pipeline in a module's backward passes: on each bucket, and after the last one.

    Attributes:
        leaves: Path -> parameter.
        flats: The parameters' memory, which the states of pure functions must not share.
    """

    # A `Call` reads these; see `BucketHook`.
    flat, fresh = False, False

    def __init__(self, ddp: DistributedDataParallel, hook: Transform, pipeline: Pipeline | None, mesh: Mesh) -> None:
        self._mesh, self.pipeline, self._hook, self._stages = mesh, pipeline, hook, stages(hook)
        self.skips = None if pipeline is None else pipeline.skips
        self.outer: Any = self.skips.begin(()) if self.skips else None
        self._plan = plan = make_plan(hook, mesh.shape, pipeline.after if pipeline else None)
        # Whether the pipeline transforms parameters, for which the ranks that share gradients sum their weights.
        self._transforms = pipeline is not None and pipeline.after is not None
        ignored = ddp.parameters_to_ignore
        params = {path: p for path, p in ddp.module.named_parameters() if p.requires_grad and path not in ignored}
        self.leaves, self._path_of = params, {p: path for path, p in params.items()}
        self.flats = [p.detach() for p in params.values()]
        self._step_check = StepCheck(mesh.size, skips=self.skips is not None)
        self._late: Counts | None = None  # this pass's message about the ranks that left out the step before
        self._lane: dict[str, float] | None = None
        held = {path: p.detach() for path, p in params.items()}
        if pipeline is not None:
            for path, p in held.items():
                check_dense(f"parameter {path!r}", p)
        if self.skips and self.skips.scaled:
            refuse_float16(held)
        self.hook_state: tuple[Any, ...] = copy_if_aliased(tuple(part.init(held) for part in self._stages), self.flats)
        self.after_state = copy_if_aliased(pipeline.after.init(held), self.flats) if pipeline and pipeline.after else ()
        self.stepper = ForeachStepper()
        if pipeline is not None:
            if pipeline.optimizer.check:
                pipeline.optimizer.check(held)
            items = [(path, pipeline.optimizer.at(path), p, None) for path, p in held.items()]
            self.stepper.begin(items)
            self._watched = [item for item in items if item[1].watched]
        # Whether the optimizer directly follows a plain sum, and whether its kernels can divide.
        self._bare = pipeline is not None and plan.reduce is not None and len(self._stages) == 1
        self._kernels_divide = pipeline is not None and all(
            divides(part, dtype)
            for part, dtype in {(pipeline.optimizer.at(path), p.dtype) for path, p in params.items()}
        )
        self.step, self.total = 0, math.nan
        self.loaded = False  # whether a state has been loaded since the last pass
        self.pending: float | None = None  # the weight for the next synchronised pass
        self._weight = 1.0
        self._outs: list[DDPBucket] = []
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._missing = set[str]()  # the parameters whose buckets have not yet come in this pass
        self._calls: list[Call] = []
        self._interleaver: Interleaver | None = None
        self._side: SideStream | None = None  # on CUDA
        self._sum: WeightedSum | None = None
        self._buckets = first_buckets(ddp, params)
        self.scaling = ScaledLoss(params.values()) if self.skips and self.skips.scaled else None
        # A parameter that no rank uses is not stepped, and the hook's state for it must stay unchanged.
        asks = (pipeline is not None or hook.compression is not None) and (
            ddp.find_unused_parameters or ddp.static_graph
        )
        self._used = UsedParameters(params, mesh) if asks else None

    def explain(self) -> Explanation:
        """The messages of a pass, with the buckets of the last pass, or before any pass those of the first."""
        words = 0 if self._used is None else len(self.leaves)
        return explain_cut(self.pipeline or self._hook, self.leaves, self._mesh.shape, lambda _: self._buckets, words)

    # -- bucket by bucket -------------------------------------------------------------------------------

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send one bucket; the returned future completes after the last bucket."""
        if bucket.buffer().is_sparse:
            raise TypeError(
                "the module has sparse gradients, which are not supported; for nn.Embedding pass sparse=False"
            )
        out = DDPBucket(tuple(self._path_of[p] for p in bucket.parameters()), bucket)
        # Without `index` and `is_last`: in a static graph's first pass all buckets have index 0, and none is last.
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[out.grads.device] if out.grads.is_cuda else None
        )
        try:
            if not self._missing:
                self._begin()
            self._missing.difference_update(out.bucket.paths)
            self._outs.append(out)
            self._futures.append(future)
            with torch.no_grad():
                self._launch(out)
                if not self._missing:
                    self._finish()
        except BaseException as error:
            self._forget()
            failure = self._mesh.root_cause(error, self.step)
            try:
                if isinstance(failure, (PeerLost, CollectiveTimeout)):
                    # The group stays: the module's reducer, which runs this, holds it. All ranks may raise other
                    # errors alike.
                    self._mesh.report(failure, self.step)
                if failure is error:
                    raise
                raise failure from error
            finally:
                del failure, error
        return future

    def _begin(self) -> None:
        self._forget()
        shadows = torch._C._current_graph_task_id() < 0  # called by a Join, on a rank without input
        if self.scaling is not None and not shadows:
            self.scaling.check()
        if self.loaded:
            same_step(self._mesh, self.step)
            self.loaded = False
        self._missing = set(self.leaves)
        self._weight, self.pending = (0.0 if shadows else 1.0) if self.pending is None else self.pending, None
        self._lane = {"weight": self._weight} if self._transforms else None
        if self.pipeline is not None and self.skips is None and self._plan.reduced(self.step).axes != self._plan.agree:
            self._late = Counts(self._mesh, self._plan.agree, 0.0, self._step_check.left_out)

    def _forget(self) -> None:
        """Discard a pass that has ended or failed."""
        if self._interleaver is not None:
            self._interleaver.clear()
        self._outs, self._futures, self._calls, self._missing = [], [], [], set()
        self._interleaver = self._sum = self._late = None

    def _launch(self, out: DDPBucket) -> None:
        if self.scaling is not None:
            unscale(out.grads, 1 / self.outer.scale.double())
            if self.scaling.missed:
                out.grads.fill_(math.nan)  # makes all ranks leave the step out
        if self._plan.reduce is not None:
            if self._sum is None:
                self._sum = WeightedSum(self._mesh, self._plan, self._weight, self._transforms, out.grads.device)
            self._sum.send(out)
            return
        if self._plan.early is None:
            return
        if not self._calls:
            axes, buckets = self._mesh.axes, self._buckets  # the last pass's buckets, the same number on all ranks
            self._interleaver = Interleaver(axes) if travel(axes, buckets, "cpu") else None
            self._side = self._side or (SideStream(out.grads.device) if travel(axes, buckets, "cuda") else None)
        paths, params = out.bucket.paths, {path: self.leaves[path].detach() for path in out.bucket.paths}
        count = len(stages(self._plan.early))
        states = tuple(restrict(state, self.leaves, paths) for state in self.hook_state[:count])
        old = states if count > 1 else states[0]
        call = Call(self, old, params, self._weight, self._lane, self._calls[0] if self._calls else None)
        call.out = out
        self._calls.append(call)
        if self._interleaver is not None:
            out.work = self._interleaver.start(call)
            return
        with bind_axes({**bound(), **self._mesh.axes}):
            if self._side is not None:
                out.work = self._side.start(call)
            else:
                call()

    def update(self, *args: Any, **extra: Any) -> tuple[Any, Any]:
        """Call the stages that run bucket by bucket; returns their gradients and state."""
        early = self._plan.early
        assert early is not None
        return early.update(*args, lane_dtype=torch.float64, step=self.step, **donate_kwargs(early), **extra)

    # -- after the last bucket ----------------------------------------------------------------------------

    def _finish(self) -> None:
        for out in self._outs:
            out.wait()
            if self._bare:
                self._step_check.observe(out)  # while later messages are still under way
        new: tuple[Any, ...] = ()
        found: MeanState | None = None  # the sums of the last reduction
        divisor = 1.0
        if self._plan.reduce is not None:
            found, divisor = self._summed()
            new = (found,)
        elif self._calls:
            new, found = self._called()
        if not self._bare:
            divide(self._outs, divisor)
            divisor = 1.0
        states = self.hook_state[len(new) :]
        if rest := self._stages[len(new) :]:
            given = (
                {"weight": self._weight, "lane": self._lane}
                if found is None
                else {"weight": found.total, "lane": found.lane}
            )
            states = run_stages(
                rest, states, self, self._outs, self._mesh, **given, lane_dtype=torch.float64, step=self.step
            )
            found = last_sums(rest, states) or found
        if found is not None:
            self.total = float(found.total)
        if self.pipeline is None:
            self.hook_state = keep_unused_state(self._used_anywhere(), (*new, *states), self.hook_state, self.leaves)
        else:
            self._step(self.pipeline, (*new, *states), divisor, found)
        self.step += 1
        self._buckets = tuple(out.bucket for out in self._outs)
        for future, out in zip(self._futures, self._outs, strict=True):
            future.set_result(out.grads)
        self._forget()

    def _summed(self) -> tuple[MeanState, float]:
        """The sums of a plain reduction, and the remaining divisor of the gradients."""
        assert self._sum is not None
        total, over = self._sum.total, self._plan.over
        lane = {"weight": torch.tensor(self._sum.weight, dtype=torch.float64)} if self._transforms else {}
        divisor = 1.0 if over is None else float(self._sum.ranks) if over == "world" else total
        return MeanState(torch.tensor(total, dtype=torch.float64), lane), divisor

    def _called(self) -> tuple[tuple[Any, ...], MeanState | None]:
        """The states of the stages that ran bucket by bucket, and the sums of the last of them that reduces."""
        early = self._plan.early
        assert early is not None
        states = [call.state for call in self._calls]
        merged = merge(states, self.leaves)
        new = merged if len(stages(early)) > 1 else (merged,)
        return new, early.sums(states[0]) if early.sums is not None else None

    def _step(self, pipeline: Pipeline, state: tuple[Any, ...], divisor: float, found: MeanState | None) -> None:
        """Decide on the step, and step the module's parameters in place; the gradients are not yet divided.

        Args:
            divisor: The remaining divisor of the gradients.
            found: The sums of the hook's last reduction.
        """
        outs, used = self._outs, self._used_anywhere()
        if not self._bare:
            for out in outs:
                self._step_check.observe(out)
        axes, equal = self._plan.reduced(self.step)
        if equal:
            assert found is not None
            sums: dict[str, Any] = {"weight": float(found.lane["weight"] if self._transforms else found.total)}
        else:  # the ranks' gradients differ, and so may their decisions
            sums = Counts(self._mesh, axes, self._weight, float(self._step_check.bad(outs))).wait()
            self.total = sums["weight"] if axes else math.nan
        sums.update(total=sums["weight"], loss=0.0)
        counts = None if axes == self._plan.agree else {} if self._late is None else self._late.wait()
        try:
            self.stepper.check_rates(self._watched)
        except (TypeError, ValueError) as error:
            return raise_after_backward(error)
        decision = self._step_check.decide(self.step, sums, outs, 1.0, None, counts)
        if self.scaling is not None and (missed := self.scaling.take_error()) is not None:
            raise_after_backward(missed)
        if self.skips is not None:
            self.outer = decision.effect.update_counters(self.skips, self.outer)
        elif decision.error is not None:
            raise_after_backward(decision.error)
        by_kernels = (
            self._kernels_divide and decision.changes and used is None and self._step_check.readable_without_sync(outs)
        )
        scale = None
        if by_kernels and divisor != 1.0:
            scale = torch.tensor(divisor, dtype=torch.float64)
        else:
            divide(self._outs, divisor)
        self.hook_state = decision.effect.keep(
            keep_unused_state(used, state, self.hook_state, self.leaves), self.hook_state
        )
        if decision.changes:
            items = [
                (path, pipeline.optimizer.at(path), self.leaves[path].detach(), grad)
                for out in outs for path, grad in out.by_path().items() if used is None or path in used
            ]  # fmt: skip
            self.stepper.step(items, grad_scale=scale, found_inf=decision.found_inf)
        elif decision.error is not None and self.skips is None:
            return
        if pipeline.after is not None:
            held, weight = {path: p.detach() for path, p in self.leaves.items()}, sums["weight"]
            self.after_state = run_after(
                pipeline.after,
                self._mesh,
                held,
                self.stepper.states,
                self.after_state,
                self.flats,
                weight,
                decision.effect,
                self.step,
            )

    def _used_anywhere(self) -> set[str] | None:
        """The parameters that some rank has used; None for all parameters."""
        return None if self._used is None else self._used.anywhere()


# The modules that have a hook of ours, which divides by itself.
REGISTERED: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
