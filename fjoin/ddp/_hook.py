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
from ..groups._consistency import parameters_fit, same_step
from ..groups._mesh import Mesh
from ..reducer._bucket_hooks import BucketCall
from ..reducer._flat_params import copy_if_aliased
from ..reducer._interleave import Interleaver, travel
from ..reducer._side_stream import SideStream
from ..reducer._tree_stages import last_sums, run_stages
from ..training._left_open import LeftOpen
from ..transforms._axis_env import bind_axes, bound
from ..transforms._bucketwise import merge, restrict
from ..transforms._call import Call
from ..transforms._rider import BucketSums
from ..transforms._transform import Transform
from ..transforms.combinators._chain import behind_all, counting, stages
from ..transforms.layout._pieces import Pieces, bind_pieces
from ..transforms.pipelines._dry_run import DryRun
from ..transforms.pipelines._explain import explain_run
from ..transforms.pipelines._explanation import Explanation
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.plan._plan import make_plan
from ..transforms.reductions._reduction import MeanState
from ._buckets import DDPBucket, divide, first_buckets
from ._late_errors import after_backward
from ._module_step import ModuleStep
from ._unused_params import UsedParameters, keep_unused_state
from ._weighted_sum import WeightedSum


class DDPRun:
    """Runs a hook or pipeline in a module's backward passes: on each bucket, and after the last one.

    Attributes:
        leaves: Path -> parameter.
        flats: The parameters' memory, which the states of pure functions must not share.
    """

    # A `BucketCall` reads these; see `BucketHook`.
    flat, fresh = False, False

    def __init__(self, ddp: DistributedDataParallel, hook: Transform, pipeline: Pipeline | None, mesh: Mesh) -> None:
        self._mesh, self._hook, self._stages = mesh, hook, stages(hook)
        self._plan = plan = make_plan(hook, mesh.shape, *(pipeline.ends if pipeline else ()))
        # Whether the pipeline transforms parameters, for which the ranks that share gradients sum their weights.
        self._transforms = pipeline is not None and bool(pipeline.ends)
        if pipeline is None and hook.sharded_over:
            raise ValueError(
                f"{hook!r} leaves each rank only its piece of the gradients, so it needs the optimizer that steps the piece; register "
                f"fuse({hook!r}, optimizer)"
            )
        ignored = ddp.parameters_to_ignore
        params = {path: p for path, p in ddp.module.named_parameters() if p.requires_grad and path not in ignored}
        self.leaves, self._path_of = params, {p: path for path, p in params.items()}
        self.flats = [p.detach() for p in params.values()]
        held = {path: p.detach() for path, p in params.items()}
        self.pieces: Pieces | None = None
        self._pieces_of: dict[tuple[str, ...], Pieces] = {}  # of the module's buckets, by their paths
        if pipeline is not None and pipeline.sharding is not None:
            # By the parameters, not by the module's buckets, which change after the first pass.
            with bind_axes(mesh.axes):
                self.pieces = pipeline.sharding.pieces(held)
        self.pipeline_step = None
        if pipeline is not None:
            self.pipeline_step = ModuleStep(pipeline, plan, mesh, params, self._transforms, self.pieces)
        self.hook_state: tuple[Any, ...] = copy_if_aliased(self._init(held), self.flats)
        self._lane: dict[str, float] | None = None
        # Whether the optimizer directly follows a plain sum; its kernels may then divide.
        self._bare = pipeline is not None and plan.reduce is not None and len(self._stages) == 1
        self.step, self.total = 0, math.nan
        self.left = LeftOpen(self, pipeline.ends if pipeline else (), "handle.flush()")
        self.loaded = False  # whether a state has been loaded since the last pass
        self.pending: float | None = None  # the weight for the next synchronised pass
        self._weight = 1.0
        self._outs: list[DDPBucket] = []
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._missing = set[str]()  # the parameters whose buckets have not yet come in this pass
        self._calls: list[BucketCall] = []
        self._interleaver: Interleaver | None = None
        self._side: SideStream | None = None  # on CUDA
        self._sum: WeightedSum | None = None
        self._buckets = first_buckets(ddp, params)
        # A parameter that no rank uses is not stepped, and the hook's state for it must stay unchanged.
        asks = (pipeline is not None or hook.compression is not None) and (
            ddp.find_unused_parameters or ddp.static_graph
        )
        self._used = UsedParameters(params, mesh) if asks else None

    def _init(self, params: dict[str, Tensor]) -> tuple[Any, ...]:
        """The states of the hook's stages; those behind one that shards get this rank's slices."""
        states = []
        with bind_axes(self._mesh.axes), bind_pieces(self.pieces):
            for part in self._stages:
                states.append(part.init(params))
                if part.sharded_over and self.pieces is not None:
                    params = self.pieces.own(params)
        return tuple(states)

    def explain(self) -> Explanation:
        """The messages of a pass, with the buckets of the last pass, or before any pass those of the first."""
        words = 0 if self._used is None else len(self.leaves)
        what = self._hook if self.pipeline_step is None else self.pipeline_step.pipeline
        sharding = what.sharding if isinstance(what, Pipeline) else None
        pieces = None if sharding is None else sharding.pieces
        run = DryRun(what, self.leaves, self._mesh.shape, lambda _: self._buckets, module_words=words, pieces=pieces)
        return explain_run(run)

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
            self.left.failed = True
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
        if self.loaded:
            same_step(self._mesh, self.step)
            if self._transforms and self.pipeline_step is not None:
                parameters_fit(self._mesh, self.pipeline_step.fits(), self.step)
            self.loaded = False
        self._missing = set(self.leaves)
        self._weight, self.pending = (0.0 if shadows else 1.0) if self.pending is None else self.pending, None
        self._lane = {"weight": self._weight} if self._transforms else None
        if self.pipeline_step is not None:
            self.pipeline_step.begin(self.step, scaled=not shadows)

    def _forget(self) -> None:
        """Discard a pass that has ended or failed."""
        if self._interleaver is not None:
            self._interleaver.clear()
        self._outs, self._futures, self._calls, self._missing = [], [], [], set()
        self._interleaver = self._sum = None

    def _launch(self, out: DDPBucket) -> None:
        if self.pipeline_step is not None:
            self.pipeline_step.before_hook(out)
        if self._plan.reduce is not None:
            if self._sum is None:
                self._sum = WeightedSum(self._mesh, self._plan, self._weight, self._transforms, out.grads.device)
            self._sum.send(out)
            return
        if self._plan.early is None:
            return
        if not self._calls:
            axes = self._mesh.axes if self._plan.reduced(self.step).axes else {}
            buckets = self._buckets  # the last pass's buckets, the same number on all ranks
            self._interleaver = Interleaver(axes) if travel(axes, buckets, "cpu") else None
            self._side = self._side or (SideStream(out.grads.device) if travel(axes, buckets, "cuda") else None)
        paths, params = out.bucket.paths, {path: self.leaves[path].detach() for path in out.bucket.paths}
        count = len(stages(self._plan.early))
        states = tuple(restrict(state, self.leaves, paths) for state in self.hook_state[:count])
        old = states if count > 1 else states[0]
        pieces = out.pieces if self._plan.early.sharded_over else None
        call = BucketCall(self, old, params, self._calls[0] if self._calls else None, pieces)
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

    sums_dtype = torch.float64

    def update(self, grads: Any, state: Any, params: Any, sums: BucketSums, pieces: Pieces | None) -> tuple[Any, Any]:
        """Call the stages that run bucket by bucket; returns their gradients and state."""
        early = self._plan.early
        assert early is not None
        with bind_pieces(pieces):
            return early.run(grads, state, params, self._first_call().inside(sums=sums, donated=True))

    def _first_call(self) -> Call:
        """The call of the hook's first stage."""
        call = Call(self._weight, self._lane, self.step).inside(sums=BucketSums(self.sums_dtype))
        return counting(self._stages, call)

    # -- after the last bucket ----------------------------------------------------------------------------

    def _finish(self) -> None:
        pipeline_step = self.pipeline_step
        for out in self._outs:
            out.wait()
            if self._bare and pipeline_step is not None:
                pipeline_step.observe(out)  # while later messages are still under way
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
            call = self._first_call()
            if new:
                call = behind_all(self._stages[: len(new)], new if len(new) > 1 else new[0], call)
            states = run_stages(rest, states, self, self._outs, self._mesh, call)
            found = last_sums(rest, states) or found
        if found is not None:
            self.total = float(found.total)
        used = None if self._used is None else self._used.anywhere()
        new = keep_unused_state(used, (*new, *states), self.hook_state, self.leaves)
        if self.pieces is not None:  # what the buckets hold is no gradient; before an error that ends the pass
            after_backward(self._drop_grads)
        if pipeline_step is not None:
            for out in () if self._bare else self._outs:
                pipeline_step.observe(out)
            effect, self.total = pipeline_step(self.step, self._outs, used, self._weight, divisor, found)
            new = effect.keep(new, self.hook_state)
        self.hook_state = new
        self.step += 1
        self.left.steps = self.step
        self._buckets = tuple(out.bucket for out in self._outs)
        for future, out in zip(self._futures, self._outs, strict=True):
            future.set_result(out.buffer if out.scattered else out.grads)
        self._forget()

    def _drop_grads(self) -> None:
        for p in self.leaves.values():
            p.grad = None

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


# The modules that have a hook of ours, which divides by itself, with the paths of the parameters that it steps.
REGISTERED: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[str]] = weakref.WeakKeyDictionary()
