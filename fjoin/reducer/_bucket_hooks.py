"""Hooks other than a plain reduction: they run on each bucket during backward, and on the whole tree after it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..groups._mesh import Mesh
from ..transforms._axis_env import Work, bind_axes, bound
from ..transforms._bucketwise import restrict
from ..transforms._call import ALONE, Call
from ..transforms._rider import BucketSums
from ..transforms._transform import Transform
from ..transforms.combinators._chain import behind_all, counting, counts_needed, stages
from ..transforms.layout._pieces import Pieces, bind_pieces
from ..transforms.plan._plan import Plan, takes_flat
from ._bucket_call import BucketCall
from ._buckets import GradBuffer
from ._flat_params import Storage, copy_if_aliased
from ._hook_state import FLAT, Form, HookState
from ._interleave import Interleaver, travel
from ._lane import StepLane
from ._side_stream import SideStream
from ._step_check import StepCheck
from ._tree_stages import last_sums, run_stages


class BucketHook:
    """Runs a hook other than a plain reduction, step by step. The hook applies the weights itself.

    Attributes:
        flat: Whether the hook gets a bucket as one flat tensor.
        fresh: Whether the output is freshly allocated (it may take the place of the gradient buffer).
    """

    unit: float = 1.0
    by_weight: bool = True
    clip = None

    def __init__(self, plan: Plan, mesh: Mesh, lane: StepLane, step_check: StepCheck, accumulates: bool) -> None:
        self._plan, self._early, self._mesh, self._step_check = plan, plan.early, mesh, step_check
        self._lane, self._equal, self._step, self._accumulates = lane, False, 0, accumulates
        self._stages, self.scales = stages(plan.hook), True
        self._counts = counts_needed(self._stages)
        self.flat = plan.early is not None and takes_flat(plan.early)
        last = stages(plan.early)[-1:] if plan.early is not None else []
        self.fresh = any(part.reduces is not None and part.reduces.fusable for part in last)
        self._given = 1.0  # the weight that this step's gradients already carry, divided out before the hook
        self._interleaver: Interleaver | None = None
        self._calls: list[BucketCall] = []
        self._state: HookState | None = None  # of this step
        self._call = ALONE  # of the stages that run bucket by bucket, in this step
        self._bound: dict[str, Any] = {}
        self._in_waves = False
        self._pieces: list[Pieces | None] = []  # by bucket, where the stages that run on it shard
        self._side: SideStream | None = None  # on CUDA
        # For each bucket, where the step check cannot tell from the lane whose gradients are bad: 1 if this rank's own are.
        self._own_bad: list[Any] | None = None

    def init(self, storage: Storage) -> Any:
        """The initial state; its `HookState.whole` is `hook.init(params)`."""
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        layout, early = storage.layout, self._early
        buckets: tuple[Any, ...] = ()
        if early is not None and self.flat:
            buckets = tuple(self._init_flat(early, k, storage) for k in range(len(layout)))
        elif early is not None:
            with bind_pieces(storage.pieces):
                full = early.init(by_path)
            buckets = tuple(restrict(full, by_path, bucket.paths) for bucket in layout)
        count, rest = len(stages(early)) if early is not None and buckets else 0, []
        for i, part in enumerate(self._stages):
            if i >= count:
                rest.append(part.init(by_path))
            if part.sharded_over and storage.pieces is not None:
                by_path = storage.pieces.own(by_path)
        buckets, after = copy_if_aliased((buckets, tuple(rest)), storage.flats)
        form = Form(layout, storage.shapes, self.flat, count, len(self._stages), storage.pieces)
        return HookState(buckets, after, form)

    def _init_flat(self, early: Transform, k: int, storage: Storage) -> Any:
        with bind_pieces(storage.pieces and storage.pieces.flat(k, FLAT)):
            return early.init({FLAT: storage.flats[k]})

    def loss_factor(self, share: float) -> float:
        """The factor of the loss: share * unit where micro-batches are added, otherwise 1."""
        return share * self.unit if self._accumulates else 1.0

    # -- bucket by bucket -----------------------------------------------------------------------

    def prepare(self, storage: Storage) -> list[GradBuffer]:
        """The buffers of the buckets."""
        axes, layout = self._mesh.axes, storage.layout
        self._in_waves = travel(axes, layout, "cpu")
        self._side = SideStream(layout[0].device) if travel(axes, layout, "cuda") else None
        pieces = storage.pieces
        self._pieces = [None] * len(layout)
        if pieces is not None and self._early is not None and self._early.sharded_over:
            self._pieces = [pieces.flat(k, FLAT) if self.flat else pieces.only(k) for k in range(len(layout))]
        return [GradBuffer(bucket, storage.shapes, 0, pieces and pieces.only(k)) for k, bucket in enumerate(layout)]

    def start(self, state: HookState, storage: Storage, lane: StepLane, values: dict[str, Any], step: int) -> None:
        """Prepare for the buckets of a step; see `StepHook`."""
        self.stop()
        (reduced, self._equal), self._step, self._lane = self._plan.reduced(step), step, lane
        self._own_bad = None if self._equal or not reduced else []
        if lane.buffer is None:
            lane.travel_alone(lane.fit(storage.layout))
        axes = self._mesh.axes
        self._interleaver = Interleaver(axes) if self._in_waves and reduced else None
        self._bound = {**bound(), **axes}  # backward may run in a thread where no axis is bound
        self._given = values["total"] * self.unit if self._accumulates and values["total"] else 1.0
        self._call = self._first_call(values).inside(donated=True)
        for i, bucket_state in enumerate(state.buckets):
            if self.flat:
                params = {FLAT: storage.flats[i]}
            else:
                params = {path: storage.leaves[path].detach() for path in storage.layout[i].paths}
            first = self._calls[0] if i else None
            self._calls.append(BucketCall(self, bucket_state, params, first, self._pieces[i]))

    def update(self, grads: Any, state: Any, params: Any, sums: BucketSums, pieces: Pieces | None) -> tuple[Any, Any]:
        """Call the stages that run bucket by bucket; returns their gradients and state."""
        assert self._early is not None
        with bind_pieces(pieces):
            return self._early.run(grads, state, params, self._call.inside(sums=sums))

    @property
    def sums_dtype(self) -> torch.dtype:
        """The dtype of the words that the first bucket carries."""
        return self._lane.dtype

    def launch(self, index: int, out: GradBuffer) -> Work | None:
        """Run one bucket's hook until its first message is under way; `wait` runs it to its end."""
        if self._given != 1.0:
            out.grads.div_(self._given)
        if self._own_bad is not None:
            self._step_check.observe(out)
            self._own_bad.append(self._step_check.bad([out]))
        if self._early is None:
            return None
        call = self._calls[index]
        call.out = out
        if self._interleaver is not None:
            return self._interleaver.start(call)
        with torch.no_grad(), bind_axes(self._bound):
            if self._side is not None:
                return self._side.start(call)
            call()
        return call

    def stop(self) -> None:
        """Discard a step that has failed."""
        if self._interleaver is not None:
            self._interleaver.clear()
        self._calls = []

    def close(self) -> None:
        """Free the buffers."""
        self.stop()

    # -- after backward -------------------------------------------------------------------------

    def finish(
        self, old: HookState, storage: Storage, outgoing: list[GradBuffer], lane: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, float]:
        """Run the other stages on all gradients; returns the summed lane, and 1 as the divisor."""
        for out in outgoing:
            out.wait()
        buckets, call = tuple(bucket.state for bucket in self._calls), self._first_call(lane)
        self.stop()
        if buckets:
            call = behind_all(self._stages[: old.form.n_early], buckets[0], call)
        after = run_stages(self._stages[old.form.n_early :], old.rest, storage, outgoing, self._mesh, call)
        self._state = state = HookState(buckets, after, old.form)
        for out in outgoing:
            self._step_check.observe(out)
        if not self._equal:
            return None, 1.0
        last = self._last_sums(state)
        return self._lane.once(self._step_check.from_tensors({**last.lane, "total": last.total})), 1.0

    def share(self, outgoing: list[GradBuffer]) -> None:
        """Share whether pieces of gradients are finite."""
        if (axis := self._plan.hook.sharded_over) is not None:
            self._step_check.share(outgoing, self._mesh.axes[axis])

    def verdict(self, outgoing: list[GradBuffer], lane: dict[str, Any]) -> dict[str, Any]:
        """The summed lane, and whether each rank's gradients are finite.

        Those after a reduction hold values of other ranks too: they make the total NaN, and the rank's bit tells of its own
        gradients before.
        """
        bad = self._step_check.bad(outgoing)
        if self._own_bad is not None:
            lane = {**lane, "total": _nan_if(bad, lane["total"])}
            bad = functools.reduce(_either, self._own_bad, 0.0)
        self._lane.write(self._lane.mark(lane, bad))
        self._lane.send().wait()
        return self._step_check.read_lane(self._lane)

    def new_state(self, sums: dict[str, Any], outgoing: list[GradBuffer]) -> HookState | None:
        """The state after the step."""
        state, self._state = self._state, None
        return state

    def _first_call(self, lane: dict[str, Any]) -> Call:
        """The call of the hook's first stage. Its messages carry the lane, unless that is sent separately."""
        carried = {name: v for name, v in lane.items() if name != "total"} if self._equal else None
        call = Call(lane["weight"], carried, self._step).inside(unit=self.unit, sums=BucketSums(self._lane.dtype))
        return counting(self._counts, call)

    def _last_sums(self, state: HookState) -> Any:
        """The sums of the hook's last reduction apart from the gradients, a `MeanState`."""
        found = last_sums(self._stages[state.form.n_early :], state.rest)
        return found or self._early.sums(state.buckets[0])  # type: ignore[union-attr,misc]


def _nan_if(bad: Any, value: Any) -> Any:
    if isinstance(bad, Tensor):
        return torch.where(bad > 0, math.nan, torch.as_tensor(value, dtype=bad.dtype, device=bad.device))
    return math.nan if bad else value


def _either(a: Any, b: Any) -> Any:
    return torch.clamp(a + b, max=1.0) if isinstance(b, Tensor) else max(a, b)
