"""Our hooks and pipelines as the communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from .._errors import CollectiveTimeout, PeerLost
from ..agreement import Calls, parameters_fit, same
from ..groups import Communicator, raise_from
from ..step import STEP, Agreements, BucketStages, first_call
from ..transforms.axes import bind_axes
from ..transforms.base import Transform, copy_if_aliased, is_accelerator, restrict
from ..transforms.layout import Pieces
from ..transforms.pipelines import FLUSH, Counting, Explanation, Pipeline, Plan, explained, make_plan, parts_of
from ._buckets import DDPBucket, TotalWeight, first_buckets
from ._module_pass import ModulePass
from ._run import ModuleStep, UsedParameters

CALLS = Calls(
    step="a pass",
    differ="the ranks have run passes of different modules of one mesh",
    remedy="Run the same passes on all ranks, in a Join where their inputs differ",
    flush="handle.flush",
    even="Run the same number of passes on all ranks, in a Join where their inputs differ",
)


class DDPRun:
    """Runs a hook or pipeline in a module's backward passes: on each bucket, and after the last one.

    Attributes:
        leaves: Path -> parameter.
        flats: The parameters' memory, which the states of pure functions must not share.
    """

    plan: Plan
    mesh: Communicator
    leaves: dict[str, Tensor]
    step: int

    def __init__(
        self, ddp: DistributedDataParallel, hook: Transform, pipeline: Pipeline | None, mesh: Communicator
    ) -> None:
        self.mesh, self._hook = mesh, hook
        self.plan = plan = make_plan(hook, mesh.shape, *(pipeline.ends if pipeline else ()))
        self.stages: BucketStages = BucketStages(plan, mesh)
        if pipeline is None and hook.sharded_over:
            raise ValueError(
                f"{hook!r} leaves each rank only its piece of the gradients, so it needs the optimizer that steps the piece; register "
                f"fuse({hook!r}, optimizer)"
            )
        ignored = ddp.parameters_to_ignore
        params = {path: p for path, p in ddp.module.named_parameters() if p.requires_grad and path not in ignored}
        self.leaves, self._path_of = params, {p: path for path, p in params.items()}
        self.flats: list[Tensor] = [p.detach() for p in params.values()]
        held = {path: p.detach() for path, p in params.items()}
        self.pieces: Pieces | None = None
        self._pieces_of: dict[tuple[str, ...], Pieces] = {}  # of the module's buckets, by their paths
        if pipeline is not None and pipeline.sharding is not None:
            # By the parameters, not by the module's buckets, which change after the first pass.
            with bind_axes(mesh.axes):
                self.pieces = pipeline.sharding.pieces(held)
        # A parameter that no rank uses is not stepped, and the hook's state for it must stay unchanged.
        asks = (pipeline is not None or hook.compression is not None) and (
            ddp.find_unused_parameters or ddp.static_graph
        )
        self.used: UsedParameters | None = UsedParameters(params, mesh) if asks else None
        parts = parts_of(hook if pipeline is None else pipeline)
        self.agreements: Agreements = Agreements(mesh, plan, parts, "module", CALLS)
        self.pipeline_step: ModuleStep | None = None
        if pipeline is not None:
            self.agreements.ids.number()
            self.pipeline_step = ModuleStep(pipeline, plan, self.agreements.check, params, self.pieces)
        self.hook_state: tuple[Any, ...] = copy_if_aliased(self.stages.init(held, self.pieces), self.flats)
        self.values: dict[str, float] = {}  # this rank's record of this pass
        one = hook.one_reduction
        self.counts: str = (
            "live" if one is not None and one.over in ("live", "world") else "weight"
        )  # what `total` is of
        # Whether the hook is a plain sum and nothing else. The kernels of an optimizer may then divide.
        self.is_sum: bool = plan.reduce is not None and len(self.stages.parts) == 1
        self.step = 0
        self.total: TotalWeight = TotalWeight(self.agreements.check, waits=pipeline is not None)
        self.loaded: bool = False  # whether a state has been loaded since the last pass
        self.pending: float | None = None  # the weight for the next synchronised pass
        self.weight: float = 1.0
        self.outs: list[DDPBucket] = []
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._missing = set[str]()  # the parameters whose buckets have not yet come in this pass
        self._buckets = first_buckets(ddp, params)
        self._pass: ModulePass | None = None

    @property
    def what(self) -> Pipeline | Transform:
        """The pipeline, or the hook where only that is registered."""
        return self._hook if self.pipeline_step is None else self.pipeline_step.pipeline

    def explain(self, at_step: int) -> Explanation:
        """The messages of a pass, with the buckets of the last pass, or before any pass those of the first."""
        what = self.what
        sharding = what.sharding if isinstance(what, Pipeline) else None
        pieces = None if sharding is None else sharding.pieces
        uses, buckets = self.used is not None, self._buckets
        of = Counting(what, self.leaves, self.mesh.shape, lambda _: buckets, uses=uses, pieces=pieces)
        return explained(of, at_step)

    # -- bucket by bucket -------------------------------------------------------------------------------

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send one bucket; the returned future completes after the last bucket."""
        if bucket.buffer().is_sparse:
            raise TypeError(
                "the module has sparse gradients, which are not supported; for nn.Embedding pass sparse=False"
            )
        paths = tuple(self._path_of[p] for p in bucket.parameters())
        if self.pieces is not None and paths not in self._pieces_of:
            self._pieces_of[paths] = self.pieces.among(paths)
        out = DDPBucket(paths, bucket, self._pieces_of.get(paths))
        # Without `index` and `is_last`: in a static graph's first pass all buckets have index 0, and none is last.
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[out.grads.device] if is_accelerator(out.grads.device) else None
        )
        try:
            if not self._missing:
                self._begin()
            self._missing.difference_update(out.bucket.paths)
            self.outs.append(out)
            self._futures.append(future)
            with torch.no_grad():
                with self.mesh.traffic.span(f"bucket {len(self.outs) - 1}"):
                    self._launch(out)
                if not self._missing:
                    self._finish()
        except BaseException as error:
            self._forget()
            failure = self.mesh.root_cause(error, self.step)
            if isinstance(failure, (PeerLost, CollectiveTimeout)):
                # The group stays: the module's reducer, which runs this, holds it. All ranks may raise other errors alike.
                self.mesh.report(failure, self.step)
            try:
                raise_from(failure, error)
            finally:
                del failure
        return future

    def brings_window(self) -> None:
        """A rank without input brings the gradients of its open accumulation window, so it counts as one with input."""
        self.pending = 1.0 if self.pending is None else self.pending

    def _begin(self) -> None:
        self._forget()
        shadows = torch._C._current_graph_task_id() < 0  # called by a Join, on a rank without input
        if self.loaded:
            remedy = "Load the same state on all ranks"
            same(self.mesh, "the first pass after load_state_dict", {"step": self.step}, remedy, step=self.step)
            if self.pipeline_step is not None and self.pipeline_step.pipeline.ends:
                parameters_fit(self.mesh, self.pipeline_step.fits(), self.step)
            self.loaded = False
        self._missing = set(self.leaves)
        self.weight, self.pending = (0.0 if shadows else 1.0) if self.pending is None else self.pending, None
        rates = [] if self.pipeline_step is None else self.pipeline_step.begin(self.step, scaled=not shadows)
        step_id = self.agreements.begin(self.step, rates)
        self.values = {"weight": self.weight, "live": float(self.weight > 0), "step_id": step_id}
        self._pass = ModulePass(self)
        with self.mesh.traffic.span(STEP) as span:
            if span is not None:
                span.next("agree: begin")
            self._pass.begin()
        if not self.is_sum:
            on_device = self.agreements.check.grads.on_device
            call = first_call(self.values, self.step, self._pass.begun, on_device)
            # The last pass's buckets, the same number on all ranks.
            self.stages.begin(call, self._buckets, bool(self.plan.reduced(self.step).axes))

    def _forget(self) -> None:
        """Discard a pass that has ended or failed."""
        self.stages.stop()
        self.outs, self._futures, self._missing, self._pass = [], [], set(), None

    def _launch(self, out: DDPBucket) -> None:
        if not self.weight and self.plan.reduced(self.step).is_partial:
            out.grads.zero_()
        if self.pipeline_step is not None:
            self.pipeline_step.before_hook(out)
        if self.plan.reduce is not None:
            assert self._pass is not None
            self._pass.send(out)
            return
        if self.plan.early is None:
            return
        paths, params = out.bucket.paths, {path: self.leaves[path].detach() for path in out.bucket.paths}
        count = self.stages.n_early
        states = tuple(restrict(state, self.leaves, paths) for state in self.hook_state[:count])
        pieces = out.pieces if self.plan.early.sharded_over else None
        out.work = self.stages.launch(out, states if count > 1 else states[0], params, pieces)

    # -- after the last bucket ----------------------------------------------------------------------------

    def _finish(self) -> None:
        assert self._pass is not None
        with self.mesh.traffic.span(STEP) as span:
            self._pass.close(span)
        self.step += 1
        self._buckets = tuple(out.bucket for out in self.outs)
        for future, out in zip(self._futures, self.outs, strict=True):
            future.set_result(out.buffer if out.scattered else out.grads)
        self._forget()

    def flush(self) -> None:
        """Run now the transforms that would run in later steps; see `TrainStep.flush`."""
        if self.pipeline_step is not None:
            self.agreements.begin_flush(self.step)
            ModulePass(self).end(FLUSH)
