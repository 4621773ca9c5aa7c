"""Hooks other than a plain reduction: they run on each bucket during backward, and on the whole tree after it."""

from __future__ import annotations

from typing import Any

from ..agreement._grad_check import GradCheck
from ..agreement._step_record import StepRecord
from ..buckets._aliases import copy_if_aliased
from ..buckets._flat_params import Storage
from ..buckets._grad_buffer import GradBuffer
from ..groups._mesh import Mesh
from ..transforms._axis_env import Work
from ..transforms.combinators._chain import stages
from ..transforms.layout._bound_pieces import bind_pieces
from ..transforms.layout._pieces import Pieces
from ..transforms.plan._plan import Plan, takes_flat
from ..transforms.transform._call import Call
from ..transforms.transform._transform import Transform
from ..transforms.tree._bucketwise import only, restrict
from ._bucket_stages import BucketStages
from ._hook_state import FLAT, Form, HookState


class BucketHook:
    """Runs a hook other than a plain reduction, step by step. The hook applies the weights itself."""

    unit: float = 1.0
    by_weight: bool = True
    clip = None

    def __init__(self, plan: Plan, mesh: Mesh, record: StepRecord, grads: GradCheck, accumulates: bool) -> None:
        self._plan, self._early, self._grads = plan, plan.early, grads
        self._record, self._equal, self._accumulates = record, False, accumulates
        self._flat = plan.early is not None and takes_flat(plan.early)
        last = stages(plan.early)[-1:] if plan.early is not None else []
        fresh = any(part.reduces is not None and part.reduces.fusable for part in last)
        self._stages = BucketStages(plan, mesh, self._flat, fresh)
        self._given = 1.0  # the factor that a window of several calls has put on gradients; the hook weighs them itself
        self._old: tuple[HookState, Storage] | None = None  # the state and the parameters from which this step begins
        self._state: HookState | None = None  # of this step
        self._pieces: list[Pieces | None] = []  # by bucket, where the stages that run on it shard

    def init(self, storage: Storage) -> Any:
        """The initial state; its `HookState.whole` is `hook.init(params)`."""
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        layout, early = storage.layout, self._early
        buckets: tuple[Any, ...] = ()
        if early is not None and self._flat and not early.sharded_over:
            flats = {f"{FLAT} {k}": flat for k, flat in enumerate(storage.flats)}
            # Together, so that buckets share their small tensors, which are then changed once.
            whole = early.init(flats)
            buckets = tuple(only(whole, flats, path, FLAT) for path in flats)
        elif early is not None and self._flat:
            buckets = tuple(self._init_flat(early, k, storage) for k in range(len(layout)))
        elif early is not None:
            with bind_pieces(storage.pieces):
                full = early.init(by_path)
            buckets = tuple(restrict(full, by_path, bucket.paths) for bucket in layout)
        count = self._stages.n_early if buckets else 0
        rest = self._stages.init(by_path, storage.pieces, count)
        buckets, after = copy_if_aliased((buckets, rest), storage.flats)
        form = Form(layout, storage.shapes, self._flat, count, len(self._stages.parts), storage.pieces)
        return HookState(buckets, after, form)

    def _init_flat(self, early: Transform, k: int, storage: Storage) -> Any:
        with bind_pieces(storage.pieces and storage.pieces.flat(k, FLAT)):
            return early.init({FLAT: storage.flats[k]})

    def loss_factor(self, share: Any) -> Any:
        """The factor of the loss: share * unit where micro-batches are added, otherwise 1."""
        return share * self.unit if self._accumulates else 1.0

    # -- bucket by bucket -----------------------------------------------------------------------

    def prepare(self, storage: Storage) -> list[GradBuffer]:
        """The buffers of the buckets."""
        layout, pieces = storage.layout, storage.pieces
        self._pieces = [None] * len(layout)
        if pieces is not None and self._early is not None and self._early.sharded_over:
            self._pieces = [pieces.flat(k, FLAT) if self._flat else pieces.only(k) for k in range(len(layout))]
        return [GradBuffer(bucket, storage.shapes, 0, pieces and pieces.only(k)) for k, bucket in enumerate(layout)]

    def start(self, state: HookState, storage: Storage, record: StepRecord, values: dict[str, Any], step: int) -> None:
        """Prepare for the buckets of a step; see `StepHook`."""
        (reduced, self._equal), self._record = self._plan.reduced(step), record
        self._given = values["total"] * self.unit if self._accumulates and values["total"] else 1.0
        # The hook's messages carry the record, unless that is sent separately.
        carried = {name: v for name, v in values.items() if name != "total"} if self._equal else None
        call = Call(values["weight"], carried, step, donated=True, unit=self.unit)
        self._stages.begin(call, record.dtype, storage.layout, bool(reduced))
        self._old = state, storage

    def launch(self, index: int, out: GradBuffer) -> Work | None:
        """Run one bucket's hook until its first message is under way; `wait` runs it to its end."""
        if self._given != 1.0:
            out.grads.div_(self._given)
        self._grads.before_hook(out)
        if self._early is None or self._old is None:
            return None
        state, storage = self._old
        params = {FLAT: storage.flats[index]}
        if not self._flat:
            params = {path: storage.leaves[path].detach() for path in storage.layout[index].paths}
        return self._stages.launch(out, state.buckets[index], params, self._pieces[index])

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._stages.stop()
        self._old = None

    def close(self) -> None:
        """Free the buffers."""
        self.stop()

    # -- after backward -------------------------------------------------------------------------

    def finish(
        self, old: HookState, storage: Storage, outgoing: list[GradBuffer], values: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, float]:
        """Run the other stages on all gradients; returns the summed record, and 1 as the divisor."""
        for out in outgoing:
            out.wait()
        buckets, rest, found = self._stages.finish(outgoing, old.rest, storage)
        self._state, self._old = HookState(buckets, rest, old.form), None
        for out in outgoing:
            self._grads.observe(out)
        if not self._equal or found is None:
            return None, 1.0
        sums = self._grads.readable({**found.lane, "total": found.total})
        return self._record.once(sums, values["step_id"]), 1.0

    def new_state(self, sums: dict[str, Any], outgoing: list[GradBuffer]) -> HookState | None:
        """The state after the step."""
        state, self._state = self._state, None
        return state
