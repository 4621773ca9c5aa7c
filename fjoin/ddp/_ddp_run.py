"""Our hooks and pipelines as the communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from .._errors import CollectiveTimeout, PeerLost
from ..buckets import GradBuffer
from ..groups import Communicator, raise_from
from ..optim import divides
from ..records import Calls, compare, parameters_fit
from ..step import STEP, EndStates, HookState, Reducer, StepData, StepRecords, make_reducer, stages_of, whole_of
from ..transforms.axes import bind_axes, bound_call
from ..transforms.base import Transform, devices, state_dicts
from ..transforms.combinators import stages
from ..transforms.layout import Bucket, Pieces
from ..transforms.optimizers import with_hyperparameters
from ..transforms.pipelines import Counting, Explanation, Pipeline, PipelineState, make_plan, parts_of
from ._buckets import DDPBucket, TotalWeight, bucket_of, first_buckets
from ._module_params import ModuleParams, ScaledLoss, UsedParameters
from ._module_pass import ModulePass

CALLS = Calls(
    step="a pass",
    differ="the ranks have run passes of different modules of one mesh",
    remedy="Run the same passes on all ranks, in a Join where their inputs differ",
    flush="handle.flush",
    even="Run the same number of passes on all ranks, in a Join where their inputs differ",
)
_CARRY = "write handle.scale(loss, weight).backward() in the place of handle.weight(weight)"


class DDPRun:
    """Runs a hook or pipeline in a module's backward passes: on each bucket, and after the last one.

    Attributes:
        params: The parameters, with the states of their optimizer.
        body: The data of the state: that of the hook, and of what runs after the optimizer.
        scaling: Of a pipeline in `dynamic_loss_scale`.
        error: Of this pass's hyperparameters.
    """

    def __init__(
        self, ddp: DistributedDataParallel, hook: Transform, pipeline: Pipeline | None, mesh: Communicator
    ) -> None:
        self.mesh, self.hook, self.pipeline = mesh, hook, pipeline
        # After a pass the gradients are the hook's result.
        self.plan = plan = make_plan(hook, mesh.shape, *(pipeline.ends if pipeline else ()), clips=False)
        if pipeline is None and hook.sharded_over:
            raise ValueError(
                f"{hook!r} leaves each rank only its piece of the gradients, so it needs an optimizer; register fuse({hook!r}, optimizer)"
            )
        ignored = ddp.parameters_to_ignore
        params = {path: p for path, p in ddp.module.named_parameters() if p.requires_grad and path not in ignored}
        self.leaves, self._path_of = params, {id(p): path for path, p in params.items()}
        self.pieces: Pieces | None = None
        if pipeline is not None and pipeline.sharding is not None:
            # By the parameters, not by the module's buckets, which change after the first pass.
            with bind_axes(mesh.axes):
                self.pieces = pipeline.sharding.pieces({path: p.detach() for path, p in params.items()})
        # A parameter that no rank uses is not stepped, and the hook's state for it must stay unchanged.
        asks = (pipeline is not None or hook.facts.compression is not None) and (
            ddp.find_unused_parameters or ddp.static_graph
        )
        self.used: UsedParameters | None = UsedParameters(params, mesh) if asks else None
        layout = first_buckets(ddp, params)
        self._buckets = {bucket.paths: (bucket, self._pieces_of(bucket)) for bucket in layout}
        self.params: ModuleParams = ModuleParams(params, self.pieces, layout)
        ends = EndStates() if pipeline is None else self.params.init(pipeline)
        parts = parts_of(self.what)._replace(compares=self.params.compares)
        self.records: StepRecords = StepRecords(mesh, plan, parts, "module", CALLS)
        self.reducer: Reducer = make_reducer(plan, mesh, self.records, "module")
        skips = None if pipeline is None else pipeline.skips
        self.divides = False
        self.scaling: ScaledLoss | None = None
        self.records.ids.number()
        if pipeline is not None:
            at = pipeline.optimizer.at
            self.divides = all(
                divides(part, dtype) for part, dtype in {(at(path), p.dtype) for path, p in params.items()}
            )
            self.scaling = ScaledLoss(params.values()) if skips and skips.scaled else None
        with bind_axes(mesh.axes):
            state = self.reducer.init(self.params)
        outer = skips.begin(()) if skips else None
        self.body: StepData = StepData(storage=self.params, hook=state, ends=ends, outer=outer)
        self.counts = "live" if plan.reduced(0).counts == {"live"} else "weight"  # what `total` is of
        self.total: TotalWeight = TotalWeight(self.records.check, waits=pipeline is not None)
        self.loaded: bool = False  # whether a state has been loaded since the last pass
        self._loaded_checksum, self._count = 0, len(stages(hook))
        self.pending: float | None = None  # the weight for the next synchronised pass
        self.carried: float | None = None  # the sum of the weights that its losses carry
        # Layers of torch that communicate in the forward pass, which nothing here sees.
        self._synced = [part for part in ddp.module.modules() if isinstance(part, torch.nn.SyncBatchNorm)]
        bound_call().mixed.clear()  # of what has run before
        self.mixes = False  # whether the forward pass has communicated, on all ranks
        # Whether a weight was given, or its lack was warned of; whether a pass had none; the sizes of batches in a
        # Join.
        self.weighed, self.unweighed, self._sizes = False, False, set[int]()
        self.error: TypeError | ValueError | None = None
        self._weight = 1.0
        self._under_way: list[GradBuffer] = []
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._missing = set[str]()  # the parameters whose buckets have not yet come in this pass
        self._pass: ModulePass | None = None

    @property
    def what(self) -> Pipeline | Transform:
        """The pipeline, or the hook where only that is registered."""
        return self.pipeline or self.hook

    def explain(self, at_step: int) -> Explanation:
        """The messages of a pass, with the buckets of the last pass, or before any pass those of the first."""
        what, uses, buckets = self.what, self.used is not None, self.params.layout
        compares = self.params.compares
        counting = Counting(what, self.leaves, self.mesh.shape, buckets=buckets, uses=uses, compares=compares)
        return counting.explanation(at_step)

    def checksum(self) -> int:
        """A checksum of the parameters; 0 if all ranks have equal parameters after each step."""
        return self.params.checksum() if self.pipeline is not None and self.pipeline.ends else 0

    @property
    def steps(self) -> int:
        return self.body.step

    @property
    def last_total(self) -> float:
        return self.total.read()

    def change(self, values: Mapping[str, float]) -> None:
        """Take other hyperparameters."""
        stepper = self.params.stepper
        stepper.adopt(with_hyperparameters(stepper.states, **values))

    @property
    def numbers(self) -> dict[str, Any]:
        """What goes with the state: the step, the total of the weights, and the checksum of the parameters."""
        return {"step": self.body.step, "total": self.total.read(), "parameters": self.checksum()}

    @property
    def state(self) -> Any:
        """The state in the form of the pipeline, or of the hook alone."""
        body, params = self.body, self.params
        if self.pipeline is None:
            return body.hook_state()
        window, slots = torch.zeros((), dtype=torch.float64), params.optimizer_states()
        state = PipelineState(body.hook_state(), slots, *body.ends, body.step, window, params.gather)
        return state if body.outer is None else body.outer._replace(inner=state)

    # -- the state ------------------------------------------------------------------------------------

    def dict_of(self, state: Any, step: int, total: float, parameters: int) -> dict[str, Any]:
        """What `load_state_dict` takes, of a state in the form of `state`, and of its `numbers`."""
        outer = self.body.outer
        inner = state if outer is None else state.inner
        hook = stages_of(inner if self.pipeline is None else inner.hook, self._count)
        found = {"step": step, "total": total, "hook": state_dicts.to_state_dict(hook)}
        if self.pipeline is None:
            return found
        return found | {
            "outer": state_dicts.to_state_dict(None if outer is None else state._replace(inner=outer.inner)),
            "after": state_dicts.to_state_dict(inner.after),
            "on_state": state_dicts.to_state_dict(inner.on_state),
            "gather": state_dicts.to_state_dict(inner.gather),
            "optimizer": {path: state_dicts.to_state_dict(one) for path, one in inner.optimizer.items()},
            "parameters": parameters,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state by name, with the step after which it was saved, the total, and the checksum of its parameters.

        Raises:
            ValueError: the state of another pipeline, or of other parameters; nothing is loaded.
        """
        body, params, pipeline = self.body, self.params, self.pipeline
        old = stages_of(body.hook_state(), self._count)
        whole = whole_of(state_dicts.restored("the state of the hook", old, saved["hook"]))
        if pipeline is not None:
            outer = state_dicts.restored("the state of the outer", body.outer, saved["outer"])
            after = state_dicts.restored("the state of the after", body.ends.after, saved["after"])
            on_state = state_dicts.restored("the state of on_state", body.ends.on_state, saved["on_state"])
            gather = state_dicts.restored("the state of the gather", params.gather, saved["gather"])
            if pipeline.sharding is not None and self.pieces is not None:
                pipeline.sharding.check(self.pieces, gather)
            params.load_states(saved["optimizer"], pipeline.optimizer.at)
            body.outer, body.ends, params.gather = outer, EndStates(after, on_state), gather
            self._loaded_checksum = saved["parameters"]
        body.hook = body.hook.split(whole) if isinstance(body.hook, HookState) else whole
        body.step, self.loaded = saved["step"], True
        self.records.forget()
        self.total.take(torch.tensor(saved["total"], dtype=torch.float64))

    # -- bucket by bucket -------------------------------------------------------------------------------

    def __call__(self, given: GradBucket) -> torch.futures.Future[Tensor]:
        """Send one bucket; the returned future completes after the last bucket."""
        if given.buffer().is_sparse:
            raise TypeError("sparse gradients of a module are not supported; use nn.Embedding(..., sparse=False)")
        paths = tuple(map(self._path_of.__getitem__, map(id, given.parameters())))
        if paths not in self._buckets:
            new = bucket_of(paths, given.buffer().numel(), given.buffer())
            self._buckets[paths] = new, self._pieces_of(new)
        bucket = DDPBucket(*self._buckets[paths], given)
        # Without `index` and `is_last`: in a static graph's first pass all buckets have index 0, and none is last.
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[bucket.grads.device] if devices.is_accelerator(bucket.grads.device) else None
        )
        try:
            if not self._missing:
                self._begin()
            self._missing.difference_update(bucket.layout.paths)
            self._under_way.append(bucket)
            self._futures.append(future)
            with torch.no_grad():
                if not self._weight and self.plan.reduced(self.body.step).is_partial:
                    bucket.grads.zero_()
                if self.scaling is not None and self.scaling.missed:
                    bucket.grads.fill_(math.nan)  # makes all ranks leave the step out
                assert self._pass is not None
                bucket.work = self._pass.launch(len(self._under_way) - 1, bucket)
                if not self._missing:
                    self._finish()
        except BaseException as error:
            self._forget()
            failure = self.mesh.root_cause(error, self.body.step)
            if isinstance(failure, (PeerLost, CollectiveTimeout)):
                # The group stays: the module's reducer, which runs this, holds it. All ranks may raise other errors
                # alike.
                self.mesh.report(failure, self.body.step)
            try:
                raise_from(failure, error)
            finally:
                del failure
        return future

    def saw(self, batch: Any) -> None:
        """Warn, once, of batches of several sizes in a Join that count the same for want of a weight."""
        x = next(iter(_find_tensors(batch)), None)
        if not self.weighed and x is not None and x.dim() and self.counts == "weight":
            self._sizes.add(len(x))
            if len(self._sizes) > 1:
                self.weighed = True
                warnings.warn(
                    f"batches of {sorted(self._sizes)} samples count the same in this Join, since handle.weight was not called; call "
                    f"handle.weight(samples) before each backward pass, with the handle that fjoin.ddp.register returned",
                    stacklevel=2,
                )

    def carry(self, weight: float) -> None:
        """Count a loss that carries its weight in the next synchronised pass; called when its backward pass begins.

        Raises:
            ValueError: that pass has a weight already that its losses do not carry.
        """
        if self.pending is not None:
            raise ValueError(
                f"this pass has the weight {self.pending!r} already; call handle.scale or handle.weight once"
            )
        self.carried, self.weighed = (self.carried or 0.0) + weight, True

    def brings_window(self) -> None:
        """A rank without input brings the gradients of its open accumulation window, so it counts as one with input."""
        self.pending = 1.0 if self.pending is None else self.pending

    def _pieces_of(self, bucket: Bucket) -> Pieces | None:
        return None if self.pieces is None else self.pieces.among(bucket.paths)

    def _begin(self) -> None:
        self._forget()
        step = self.body.step
        shadows = torch._C._current_graph_task_id() < 0  # called by a Join, on a rank without input
        if self.loaded:
            remedy = "Load the same state on all ranks"
            compare(self.mesh, "the first pass after load_state_dict", {"step": step}, remedy, step=step)
            if self.pipeline is not None and self.pipeline.ends:
                parameters_fit(self.mesh, self._loaded_checksum == self.checksum(), step)
            self.loaded = False
        self._missing = set(self.leaves)
        is_weighted = self.carried is not None
        given, self.pending, self.carried = self.carried if is_weighted else self.pending, None, None
        self._weight = weight = (0.0 if shadows else 1.0) if given is None else given
        self.unweighed = self.unweighed or given is None and not shadows
        counted = self.plan.counted(weight, step)
        mixed = bound_call().mixed
        self.mixes = self.plan.starts_from_weight(step, mixed) or any(part.training for part in self._synced)
        remedy = "" if not self.mixes else self.plan.needs_equal_weights(step) if is_weighted else _CARRY
        mixed.clear()
        if self.scaling is not None and not shadows:
            self.scaling.check()
        self.params.begin()
        self.error, rates = None, list[tuple[str, float]]()
        try:
            rates = self.params.check_rates()
        except (TypeError, ValueError) as error:
            self.error = error
        step_id = self.records.begin(step, rates, (counted, remedy) if remedy else None)
        values = {"weight": weight, "live": float(weight > 0), "step_id": step_id}
        self._pass = ModulePass(self)
        with self.mesh.traffic.span(STEP) as span:
            span.next("sum the record")
            record = self.records.of_hook(step)
            late_factor = None if self.scaling is None else 1 / self.body.outer.scale.double()
            # A loss that carries its weight is in units of 1.
            window_weight = float(counted > 0) if is_weighted else counted
            self._pass.open(record, values, {"step_id": step_id}, window_weight, late_factor)

    def _forget(self) -> None:
        """Discard a pass that has ended or failed."""
        self.reducer.stop()
        self._under_way, self._futures, self._missing, self._pass = [], [], set(), None

    # -- after the last bucket ----------------------------------------------------------------------------

    def _finish(self) -> None:
        assert self._pass is not None
        body, buckets, layout = self.body, self._under_way, self.params.layout
        with self.mesh.traffic.span(STEP) as span:
            self._pass.span = span
            self._pass.close_pass(buckets)
        body.step += 1
        if len(buckets) != len(layout) or any(
            bucket.layout is not old for bucket, old in zip(buckets, layout, strict=True)
        ):
            self.params.layout = layout = tuple(bucket.layout for bucket in buckets)
            self._buckets = {bucket.layout.paths: (bucket.layout, bucket.pieces) for bucket in buckets}
            if isinstance(body.hook, HookState):
                body.hook = body.hook.relaid(layout)
        for future, bucket in zip(self._futures, buckets, strict=True):
            future.set_result(bucket.buffer if bucket.scattered else bucket.grads)
        self._forget()

    def drop_grads(self) -> None:
        """Leave no gradients at the parameters."""
        for p in self.leaves.values():
            p.grad = None

    def flush(self) -> None:
        """Run now the transforms that would run in later steps; see `TrainStep.flush`."""
        self.records.begin_flush(self.body.step)
        self.params.begin()
        ModulePass(self).flush()
