"""Runs the hook of a step on buckets: a sum, a scatter, or any stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..buckets import GradBuffer
from ..groups import Communicator, keep_freed
from ..records import StepRecord, Sums
from ..transforms.axes import Axis, PieceSum, Work
from ..transforms.base import Call, Totals, Transform, shares, trees
from ..transforms.combinators import stages
from ..transforms.layout import Pieces, bind_pieces, record_bucket
from ..transforms.pipelines import Plan, StepPlace, takes_flat
from ._body import Params
from ._hook_state import FLAT, Form, HookState
from ._records import StepRecords
from ._scaling import Scaling
from ._stages import BucketStages
from ._verdict import Clip, GradCheck

Begun: TypeAlias = Mapping[tuple[str, ...], Sums]


class Opened(NamedTuple):
    """A step that begins on this rank.

    record: the record over the axes that the hook reduces over in this step, and this rank's `values` in it.
    step: the number of steps before this one.
    begun: by axes, the records that are under way already.
    window_weight: the weight of the window's first call of weight above 0. If no loss carries the weight: the weight.
    late_factor: multiply this rank's gradients by it before they are sent: 0-d; None: by nothing.
    is_weighted: whether the gradients carry this rank's weight, since the loss has communicated.
    """

    storage: Params
    record: StepRecord
    values: dict[str, Any]
    step: int
    begun: Begun
    window_weight: float
    late_factor: Tensor | None
    is_weighted: bool = False


class Reducer(Protocol):
    """Runs the hook of a step on its buckets.

    Attributes:
        clip: The function from the norm of the reduced gradients to their clip factor; None if nothing is clipped.
        scaling: Who applies which factor of this rank's gradients.
    """

    clip: Clip | None = None
    scaling: Scaling = Scaling()
    _late_factor: Tensor | None = None  # of this step, see `Opened`
    _state: Any = None  # of this step

    def init(self, storage: Params) -> Any:
        """The initial state."""

    def prepare(self, storage: Params) -> list[GradBuffer]:
        """The buffers of the messages."""

    def start(self, state: Any, opened: Opened) -> None:
        """Prepare for the buckets of a step."""

    def launch(self, index: int, bucket: GradBuffer) -> Work | None:
        """Start the messages of a full bucket."""

    def finish(self, old: Any, storage: Params, buckets: list[GradBuffer]) -> tuple[dict[str, Any] | None, Any]:
        """Complete the messages after backward, and look at the gradients.

        Returns:
            The summed record, or None if it takes a verdict; the total, by which the gradients are divided.
        """

    def new_state(self) -> Any:
        """The state after the step; once."""
        state, self._state = self._state, None
        return state

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._state = None

    def close(self) -> None:
        """Free the buffers."""
        self.stop()


def multiply_(grads: Tensor, factor: Tensor) -> None:
    """Multiply gradients in place. Infinite elements become NaN, which no later stage makes finite again."""
    torch.nan_to_num_(grads.mul_(factor), nan=math.nan, posinf=math.nan, neginf=math.nan)


def first_call(values: Mapping[str, Any], step: int, begun: Begun, on_device: bool) -> Call:
    """The call of a hook's first stage. It knows the sums of the weights in these records, and waits for them where a
    stage needs them.
    """
    call = Call(values["weight"], step, donated=True)
    for axes, sums in begun.items():
        call.know(axes, lambda sums=sums: _totals_in(sums.read(on_device)))  # type: ignore[misc]
    return call


def _totals_in(sums: Mapping[str, Any]) -> Totals:
    """The sums of the weights in a record."""
    return shares.totals_of(sums["weight"], sums["live"])


class StagedReducer(Reducer):
    """Runs a hook other than a plain reduction, step by step. The hook applies the weights itself."""

    def __init__(self, plan: Plan, mesh: Communicator, grads: GradCheck, flat: bool) -> None:
        self._plan, self._early, self._grads = plan, plan.early, grads
        self._flat = flat and plan.early is not None and takes_flat(plan.early)
        last = stages(plan.early)[-1:] if plan.early is not None else []
        fresh = any(part.facts.reduces is not None and part.facts.reduces.fusable for part in last)
        self._stages = BucketStages(plan, mesh, self._flat, fresh)
        self._seed = 1.0  # from which backward has started: divided out, since the hook weighs the gradients itself
        self._sums: Sums | None = None  # the record, where it is sent before the gradients
        self._old: tuple[HookState, Params] | None = None  # the state and the parameters from which this step begins
        self._pieces: list[Pieces | None] = []  # by flat bucket, where the stages that run on it shard

    def init(self, storage: Params) -> Any:
        """The initial state; its `HookState.whole` is `hook.init(params)`."""
        by_path = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        layout, early = storage.layout, self._early
        buckets: tuple[Any, ...] = ()
        if early is not None and self._flat and not early.sharded_over:
            flats = {f"{FLAT} {k}": flat for k, flat in enumerate(storage.flats)}
            # Together, so that buckets share their small tensors, which are then changed once.
            whole = early.init(flats)
            buckets = tuple(trees.only(whole, flats, path, FLAT) for path in flats)
        elif early is not None and self._flat:
            buckets = tuple(self._init_flat(early, k, storage) for k in range(len(layout)))
        elif early is not None:
            with bind_pieces(storage.pieces):
                full = early.init(by_path)
            buckets = tuple(trees.restrict(full, by_path, bucket.paths) for bucket in layout)
        count = self._stages.n_early if buckets else 0
        rest = self._stages.init(by_path, storage.pieces, count)
        buckets, after = trees.copy_if_aliased((buckets, rest), storage.flats)
        form = Form(layout, storage.shapes, self._flat, count, len(self._stages.parts), storage.pieces)
        return HookState(buckets, after, form)

    def _init_flat(self, early: Transform, k: int, storage: Params) -> Any:
        with bind_pieces(storage.pieces and storage.pieces.flat(k, FLAT)):
            return early.init({FLAT: storage.flats[k]})

    # -- bucket by bucket -----------------------------------------------------------------------

    def prepare(self, storage: Params) -> list[GradBuffer]:
        """The buffers of the buckets."""
        layout, pieces = storage.layout, storage.pieces
        self._pieces = [None] * len(layout)
        if pieces is not None and self._flat and self._early is not None and self._early.sharded_over:
            self._pieces = [pieces.flat(k, FLAT) for k in range(len(layout))]
        return [GradBuffer(bucket, storage.shapes, 0, pieces and pieces.only(k)) for k, bucket in enumerate(layout)]

    def start(self, state: HookState, opened: Opened) -> None:
        """Prepare for the buckets of a step."""
        reduced, weight = self._plan.reduced(opened.step), opened.values["weight"]
        self._late_factor = opened.late_factor
        counted = self._plan.counted(weight, opened.step)
        self._seed = self.scaling.seed(counted, opened.window_weight, False) if weight else 1.0
        if opened.is_weighted and (why := self._plan.needs_equal_weights(opened.step)):
            sums = opened.begun[reduced.axes].read(False)
            if weight and not math.isclose(weight * sums["live"], sums["weight"], rel_tol=1e-6):
                text = f"{weight!r} here, and {sums['weight'] / sums['live']!r} on average; give them equal weights, or change the hook"
                raise ValueError(
                    f"the loss has communicated over {reduced.axes}, and the ranks' weights differ: {text}: {why}"
                )
        self._sums = opened.begun.get(reduced.axes) if reduced.equal else None
        call = first_call(opened.values, opened.step, opened.begun, self._grads.on_device)
        self._stages.begin(call, opened.storage.layout, bool(reduced.axes))
        self._old = state, opened.storage

    def launch(self, index: int, bucket: GradBuffer) -> Work | None:
        """Run one bucket's hook until its first message is under way; `wait` runs it to its end."""
        if self._late_factor is not None:
            multiply_(bucket.grads, self._late_factor)
        if self._seed != 1.0:
            bucket.grads.div_(self._seed)
        self._grads.before_hook(bucket)
        if self._early is None or self._old is None:
            return None
        state, storage = self._old
        old = state.of_bucket(index, bucket.layout)
        if self._flat:
            return self._stages.launch(bucket, old, {FLAT: storage.flats[index]}, self._pieces[index])
        params = {path: storage.leaves[path].detach() for path in bucket.layout.paths}
        return self._stages.launch(bucket, old, params, bucket.pieces if self._early.sharded_over else None)

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._stages.stop()
        self._old = self._sums = self._state = None

    # -- after backward -------------------------------------------------------------------------

    def finish(self, old: HookState, storage: Params, buckets: list[GradBuffer]) -> tuple[dict[str, Any] | None, float]:
        """Run the other stages on all gradients; returns the summed record, and 1 as the total."""
        for bucket in buckets:
            bucket.wait()
        states, rest = self._stages.finish(buckets, old.rest, storage)
        self._state, self._old = old.after(states, rest, [bucket.layout for bucket in buckets]), None
        for bucket in buckets:
            self._grads.observe(bucket)
        sums, self._sums = self._sums, None
        return None if sums is None else sums.read(self._grads.on_device), 1.0


class SumReducer(Reducer):
    """Runs a hook that begins with `mean` or `sum_over` and contains no further reduction.

    The buckets are summed in place; `Scaling` says who weighs and divides them.

    Args:
        weighs: Whether it multiplies the gradients by the weight, since no loss carries it.

    Attributes:
        carries_record: Whether a bucket's message may carry the record.
    """

    carries_record = True

    def __init__(self, plan: Plan, mesh: Communicator, record: StepRecord, grads: GradCheck, weighs: bool) -> None:
        assert plan.reduce is not None
        self._hook, self._plan, self._mesh, self._record, self._grads = plan.hook, plan, mesh, record, grads
        self.scaling, self._axes = Scaling.of(record.ranks, weighs), record.axes
        self._by_norm = None if plan.clip is None else plan.clip.facts.by_norm
        self.clip = None if self._by_norm is None else self._by_norm.factor
        self._float16 = False  # whether some gradients are float16
        self._window_weight = 1.0  # of this step, see `Opened`
        self._carrier: GradBuffer | None = None  # the bucket whose message carries the record
        self._stages = BucketStages(plan, mesh)  # those after the reduction run on all buckets
        self._alone: Sums | None = None  # the record's own message, where no bucket carries it

    def init(self, storage: Params) -> Any:
        """The initial state."""
        params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        return trees.copy_if_aliased(self._hook.init(params), storage.flats)

    def prepare(self, storage: Params) -> list[GradBuffer]:
        """The buffers of the messages."""
        layout, words = storage.layout, self._record.n_words
        carrier, pieces = record_bucket(layout) if self.carries_record else None, storage.pieces
        buckets = []
        for i, leaves in enumerate(layout):
            own = words if i == carrier else 0
            memory = self._mesh.zeros(leaves.numel + own, leaves.dtype, leaves.device, self._axes)
            buckets.append(GradBuffer(leaves, storage.shapes, own, pieces and pieces.only(i), memory))
        self._carrier = None if carrier is None else buckets[carrier]
        return buckets

    def start(self, state: Any, opened: Opened) -> None:
        """Prepare for the buckets of a step."""
        values, record, layout = opened.values, opened.record, opened.storage.layout
        self._window_weight, self._late_factor = opened.window_weight, opened.late_factor
        self._float16 = opened.storage.float16
        if self._plan.rest:
            self._stages.begin(Call(values["weight"], opened.step), layout, sends=False)
        if self._carrier is not None:
            words = self._carrier.words
            words.copy_(record.words(values, words.dtype, words.device))
        else:
            self._alone = opened.begun.get(self._axes) or record.send(values)

    def launch(self, index: int, bucket: GradBuffer) -> Work:
        if self._late_factor is not None:
            multiply_(bucket.grads, self._late_factor)
        if self._float16 or self.scaling.weighs:
            total = self._total(self.sums()) if self._float16 else None
            self.scaling.before_sending_(bucket.grads, self._window_weight, total)
        return self._send(bucket)

    def _total(self, sums: Mapping[str, Any]) -> Any:
        return None if self._plan.over is None else shares.nonzero_or_one(self._plan.total(sums, self._record.ranks))

    def _send(self, bucket: GradBuffer) -> Work:
        return self._mesh.reduce_(bucket.buffer, self._axes)

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._alone = self._state = None

    def close(self) -> None:
        """Free the buffers."""
        self._carrier = None

    def sums(self) -> dict[str, Any]:
        """The summed record. The bucket that carries it has arrived; a message of its own is waited for."""
        if self._carrier is not None:
            return self._record.read(self._carrier.words, self._grads.on_device)
        assert self._alone is not None
        return self._alone.read(self._grads.on_device)

    def finish(self, old: Any, storage: Params, buckets: list[GradBuffer]) -> tuple[dict[str, Any], Any]:
        """Complete the messages after backward; see `Reducer`."""
        rest = self._plan.rest
        for bucket in buckets:
            bucket.wait()
            if not rest:
                self._grads.observe(bucket)  # while later messages are still under way
        sums = self.sums()
        total = self.scaling.behind_sum(self._plan.total(sums, self._record.ranks), self._float16)
        if not rest:
            keeps = None if self._by_norm is None else self._by_norm.keeps
            kept = () if keeps is None else keeps(self._grads.norm_of(buckets) / total)
            self._state = () if self._by_norm is None else ((), kept)
            return sums, total
        for bucket in buckets:
            bucket.message_sum = None  # the stages make other values of these
            bucket.grads.div_(shares.nonzero_or_one(total))
        axes, totals = self._record.axes, _totals_in(sums)
        self._state = (old[0], *self._stages.finish(buckets, old[1:], storage, (axes, totals))[1])
        for bucket in buckets:
            self._grads.observe(bucket)
        return sums, 1.0


class ScatterReducer(SumReducer):
    """Runs a hook that begins with `scatter_mean` and contains no further reduction."""

    carries_record = False

    def init(self, storage: Params) -> Any:
        """The initial state."""
        keep_freed()
        with bind_pieces(storage.pieces):
            return super().init(storage)

    def start(self, state: Any, opened: Opened) -> None:
        """Prepare for the buckets of a step."""
        self._under_way: list[Scatter] = []
        super().start(state, opened)

    def _send(self, bucket: GradBuffer) -> Work:
        while self._under_way and self._under_way[0].arrived():  # so that its gradients can be freed
            self._under_way.pop(0).wait()
        self._under_way.append(Scatter(bucket, self._mesh.axes[self._axes[0]]))
        return self._under_way[-1]

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._under_way = []
        super().stop()


class Scatter:
    """The message of one bucket, which leaves this rank the sum of its piece.

    Attributes:
        total: After the wait: the sum of the elements of all pieces, where the transport has computed it.
    """

    def __init__(self, bucket: GradBuffer, axis: Axis) -> None:
        assert bucket.pieces is not None
        self._out = bucket
        self.total: float | None = None
        self._work: PieceSum | None = axis.begin_scatter(*bucket.in_pieces(), bucket.pieces.rank)

    def arrived(self) -> bool:
        """Whether a wait would not wait."""
        return self._work is None or self._work.arrived()

    def wait(self) -> None:
        """Take the sum."""
        if self._work is not None:
            self._out.scatter(self._work.wait())
            self.total, self._work = self._work.total, None
            if self._out.direct:
                self._out.buffer = self._out.grads


def make_reducer(plan: Plan, mesh: Communicator, records: StepRecords, place: StepPlace) -> Reducer:
    """The reducer that runs a plan.

    Args:
        place: Where its buckets are.
    """
    grads = records.check.grads
    if plan.reduce is None:
        return StagedReducer(plan, mesh, grads, flat=place == "buckets")
    kind = ScatterReducer if plan.reduce.sharded_over else SumReducer
    return kind(plan, mesh, records.of_hook(0), grads, weighs=place == "module")
