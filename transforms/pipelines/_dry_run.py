"""A step on tensors without data, over axes that record the messages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._axis_env import bind_axes
from .._bucketwise import restrict
from .._call import ALONE, Call
from .._check import axis_sizes
from .._lane import encode_lane, lane_dtype, step_lane
from .._rider import BucketSums
from .._transform import Transform
from .._tree import Tree, check_dense, flatten_in_insertion_order, named_leaves
from ..axes._collectives import axis_size, psum
from ..axes._primitive import names
from ..axes._ragged import all_to_all_single
from ..combinators._chain import counting, counts_needed, stages
from ..layout._buckets import Bucket, lane_bucket
from ..layout._pieces import Pieces, bind_pieces
from ..plan._plan import make_plan, takes_flat
from ..program._ops import Agree
from ..program._program import Parts, agreements
from ..step_param._optimizer import Optimizer
from ._explanation import Message
from ._pipeline import Pipeline, Skips
from ._recorder import Recorder

MOST_RANKS = 2**20


class DryRun:
    """The stages of a pipeline, run one by one as the shell runs them, on parameters without data.

    Args:
        pipeline: A pipeline, or a hook alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        layout: A function from a dict path -> leaf to buckets.
        on_buffers: The transform of the buffers, if any.
        pieces: A function from a dict path -> leaf to the pieces that ranks own, for a pipeline that shards.
        module_words: For the buckets of a DistributedDataParallel, whose messages carry gradients only: the number of
            words in its message about used parameters, 0 if it sends none. None for other buckets.

    Raises:
        TypeError: neither pipeline nor transform; a leaf that is no dense tensor.
        ValueError: axes that no mesh can have.
    """

    def __init__(
        self, pipeline: Pipeline | Transform, params: Tree, axes: Mapping[str, int],
        layout: Callable[[dict[str, Tensor]], tuple[Bucket, ...]], on_buffers: Transform | None = None,
        module_words: int | None = None, pieces: Callable[[dict[str, Tensor]], Pieces] | None = None,
    ) -> None:  # fmt: skip
        self.pipeline = pipeline
        self.hook, self.optimizer, self.skips, ends = _parts(pipeline)
        self.on_buffers, self.module_words, self._in_module = on_buffers, module_words, module_words is not None
        self.sizes = sizes = axis_sizes(axes, MOST_RANKS)
        for path, leaf in named_leaves(params).items():
            check_dense(f"params[{path!r}]", leaf)
        self._notes: list[Message] = []
        # By the identity of a stage, which is kept here: its messages, since a stage is asked for them more than once.
        self._known: dict[tuple[Any, ...], tuple[Transform, int, tuple[Message, ...]]] = {}
        self.at_end = False  # whether the stages to run are those at the end of a step
        self._recorders = {name: Recorder(name, n, self._notes, sizes) for name, n in sizes.items()}
        paths, leaves, _ = flatten_in_insertion_order(params)
        self.pieces: Pieces | None = None
        with self.running():
            self.params = {path: torch.zeros(p.shape, dtype=p.dtype) for path, p in zip(paths, leaves, strict=True)}
            self.pieces = pieces(self.params) if pieces else None
            self.values: Tree = self.params
            # The values that this rank steps.
            self.own: dict[str, Tensor] = self.pieces.own(self.params) if self.pieces else self.params
            self.layout, self.plan = (
                self.pieces.buckets if self.pieces and not self._in_module else layout(self.params),
                make_plan(self.hook, sizes, *ends, *(() if on_buffers is None else (on_buffers,))),
            )
        ranks, in_module = self._ranks(self.plan.reduced(0).axes), self._in_module
        own = ("weight", "step_id") * (self.optimizer is not None) if in_module else step_lane(ranks)[1:]
        self._lane = dict.fromkeys(own, 0.0) or None
        self._dtype = torch.float64 if in_module else lane_dtype(bucket.dtype for bucket in self.layout)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context without data, with the axes bound."""
        with torch.device("meta"), bind_axes(self._recorders), bind_pieces(self.pieces), torch.no_grad():  # type: ignore[arg-type]
            yield

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes.get(name, 1) for name in axes)

    def messages(
        self, part: Transform, step: int, in_hook: bool = False, per_bucket: bool = False
    ) -> tuple[Message, ...]:
        """The messages of a stage in a step.

        Args:
            in_hook: Whether the stage is in the hook, whose messages may carry the lane.
            per_bucket: Whether the stage runs on each bucket.
        """
        key = (id(part), step, in_hook, per_bucket, self.at_end)
        if key not in self._known or self._known[key][:2] != (part, id(self.values)):
            self._known[key] = part, id(self.values), self._run(part, step, in_hook, per_bucket)
        return self._known[key][2]

    def _run(self, part: Transform, step: int, in_hook: bool, per_bucket: bool) -> tuple[Message, ...]:
        del self._notes[:]
        lane = self._lane if in_hook and self.plan.reduced(step).equal else None
        if in_hook and part is self.plan.reduce:
            self._reduce(part)
        elif in_hook and part is self.plan.clip and not (self._in_module and self._sharded):
            pass  # the step knows the norm itself; of pieces it is in the message that says whether they are finite
        elif per_bucket:
            self._update_buckets(part, step, lane)
        else:
            call = Call(step=step) if self.at_end else self._call(step, lane, BucketSums(self._dtype))
            params = self.own if self.values is self.own else self.params
            given = call.inside(prefetch=_AtOnce(self._notes), persistent=self.at_end)
            _update(part, self.values, params, part.init(self.values), given)
        return tuple(self._notes)

    def _call(self, step: int, lane: Any, sums: BucketSums) -> Call:
        """The call of a stage of the hook."""
        return counting(counts_needed(stages(self.hook)), Call(None, lane, step).inside(sums=sums, **self._sharded))

    @property
    def _sharded(self) -> dict[str, Any]:
        """The keyword of the stages behind the one that shards."""
        behind = self.pieces is not None and self.values is self.own
        return {"sharded_over": self.pieces.axis} if behind and self.pieces else {}

    def _in_bucket(self, k: int, flat: bool) -> tuple[Pieces | None, dict[str, Tensor]]:
        """The pieces of a bucket, and its values: one flat tensor, or leaves.

        A module's buckets are not those from which pieces are cut, so one bucket may hold parts of several.
        """
        bucket = self.layout[k]
        leaves = {path: self.values[path] for path in bucket.paths}
        if self.pieces is not None and self._in_module:
            return self.pieces.among(bucket.paths), leaves
        if not flat:
            return self.pieces and self.pieces.only(k), leaves
        return self.pieces and self.pieces.flat(k, ""), {"": torch.zeros(bucket.numel, dtype=bucket.dtype)}

    def gather(self) -> tuple[Message, ...]:
        """The messages with the parameters that the ranks have stepped."""
        del self._notes[:]
        if isinstance(self.pipeline, Pipeline) and self.pipeline.sharding and self.pieces:
            sharding, slots = self.pipeline.sharding, self.pipeline.optimizer.init(self.own)
            sharding.gather(self.pieces, self.params, self.own, slots, sharding.init(self.pieces, self.own, slots))
        return tuple(self._notes)

    def lane_messages(self, step: int) -> tuple[tuple[Message, ...], ...]:
        """The messages of a step that carry only the record."""
        early, late = self._agreements(step)
        if self._in_module and self.plan.reduce is not None:
            early = early[1:]  # the record of the sums of the buckets is shown with them
        alone = [op for op in (*early, *late) if not op.rides and op.moment != "pieces"]
        return tuple(self.sum_of(self._counts(op.axes), op.axes) for op in alone if self._ranks(op.axes) > 1)

    def verdict(self) -> tuple[Message, ...]:
        """The messages of whether pieces of gradients are finite."""
        axes = next(op.axes for op in self._agreements(0)[1] if op.moment == "pieces")
        return self.sum_of(torch.zeros(2, dtype=torch.float64), axes)

    def _agreements(self, step: int) -> tuple[tuple[Agree, ...], tuple[Agree, ...]]:
        parts = Parts(skips=self.skips is not None)
        return agreements(self.plan, parts, step, "module" if self._in_module else "buckets")

    def sum_of(self, words: Tensor, axes: tuple[str, ...]) -> tuple[Message, ...]:
        """The messages of a sum of these words."""
        del self._notes[:]
        psum(words, axes)
        return tuple(self._notes)

    def _counts(self, axes: tuple[str, ...]) -> Tensor:
        """The record in a message of its own."""
        ranks = self._ranks(axes)
        return encode_lane(dict.fromkeys(step_lane(ranks), 0.0), self._dtype, ranks)

    def _update_buckets(self, part: Transform, step: int, lane: Any) -> None:
        """Run a stage bucket by bucket; the first bucket carries the lane."""
        assert self.plan.early is not None
        flat = takes_flat(self.plan.early) and not (self._in_module and self.pieces)
        full, sums = part.init(self.values), BucketSums(self._dtype)
        for k in range(len(self.layout)):
            pieces, some = self._in_bucket(k, flat)
            with bind_pieces(pieces):
                if flat:
                    some = pieces.own(some) if pieces and self._sharded else some
                    state = part.init(some)
                else:
                    state = restrict(full, self.params, some)
                of_bucket = BucketSums(self._dtype, sums) if k else sums
                _update(part, some, some, state, self._call(step, lane, of_bucket))

    def _reduce(self, part: Transform) -> None:
        """Run a plain reduction; one of its messages carries the lane, if there is a lane and a bucket for it."""
        assert part.reduces is not None and part.reduces.axis is not None
        axis, total, sums = part.reduces.axis, torch.ones((), dtype=torch.float64), BucketSums(self._dtype)
        sums.keep((total, {}))  # of the message of the lane
        carrier = None if self._in_module or part.sharded_over else lane_bucket(self.layout)
        words = encode_lane({"total": total, **(self._lane or {})}, self._dtype, axis_size(axis))
        if self._in_module:
            psum(self._counts(names(axis)), axis)
        elif carrier is None:
            psum(words, axis)
        for i, bucket in enumerate(self.layout):
            if self._in_module and self.pieces is not None:
                self._scatter_in_module(self.pieces.among(bucket.paths), bucket)
                continue
            pieces, some = self._in_bucket(i, flat=True)
            if i == carrier:  # behind the gradients, in the same buffer
                some = {"": torch.cat([some[""], words])}
            with bind_pieces(pieces):
                part.run(some, part.init(some), some, ALONE.inside(sums=BucketSums(self._dtype, sums)))

    def _scatter_in_module(self, pieces: Pieces, bucket: Bucket) -> None:
        """The message of a module's bucket: all slices of other ranks at once."""
        sizes = [sum(stop - start for start, stop in of.values()) for of in pieces.slices_of_all]
        give, take = [0, *sizes[1:]], [0, *(sizes[0] for _ in sizes[1:])]
        flat = torch.zeros(sum(give), dtype=bucket.dtype)
        all_to_all_single(flat, pieces.axis, input_split_sizes=give, output_split_sizes=take)


class _AtOnce:
    """A `Prefetch` that records all messages in the call that begins them."""

    def __init__(self, notes: list[Message]) -> None:
        self._notes = notes

    def begin(self, values: Any, function: Callable[[], Any], calls: int) -> None:
        function()

    def result(self, values: Any, function: Callable[[], Any]) -> Any:
        before = len(self._notes)
        found = function()
        del self._notes[before:]
        return found


def _parts(pipeline: Any) -> tuple[Transform, Optimizer | None, Skips | None, tuple[Transform, ...]]:
    if isinstance(pipeline, Pipeline):
        return pipeline.hook, pipeline.optimizer, pipeline.skips, pipeline.ends
    if isinstance(pipeline, Transform):
        return pipeline, None, None, ()
    raise TypeError(f"explain takes a pipeline or a transform, got {pipeline!r}")


def _update(part: Transform, values: Tree, params: dict[str, Tensor], state: Any, call: Call) -> Any:
    try:
        return part.run(dict(values), _at(state, call.step or 0), params, call)
    except (RuntimeError, NotImplementedError) as error:
        if not any(text in str(error) for text in _READS):
            raise
        raise TypeError(
            f"{part!r} reads a tensor's value ({error}), so its messages are not known before it runs; decide by "
            f"host integers in the state, or with torch.where"
        ) from None


# Parts of torch's errors for tensors without data.
_READS = ("meta tensor", "Meta tensor")


def _at(state: Any, step: int) -> Any:
    """The state with its host counters `step` set to this step."""
    if hasattr(state, "_fields"):
        parts = zip(state._fields, state, strict=True)
        return type(state)(*(step if name == "step" and type(v) is int else _at(v, step) for name, v in parts))
    return type(state)(_at(part, step) for part in state) if type(state) in (tuple, list) else state
