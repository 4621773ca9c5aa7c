"""A step without data, which counts what it would send."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..axes import Message, all_to_all_single, bind_axes, names, psum
from ..base import (
    Call,
    Transform,
    Tree,
    axis_sizes,
    check_dense,
    flatten_in_insertion_order,
    named_leaves,
    record_names,
    restrict,
    totals_of,
    words_dtype,
    words_per_scalar,
)
from ..combinators import behind, stages
from ..layout import Bucket, Pieces, bind_pieces, record_bucket
from ..optimizers import masters_of, state_fields
from ._explanation import Recorder, run_stage
from ._pipeline import Pipeline, parts_of
from ._plan import Parts, Place, Records, make_plan, records_of, takes_flat


def in_bucket(
    k: int, bucket: Bucket, values: Tree, pieces: Pieces | None, place: Place, flat: bool
) -> tuple[Pieces | None, dict[str, Tensor]]:
    """The pieces of the bucket of number k, and its values: one flat tensor, or leaves.

    A module's buckets are not those from which pieces are cut, so one bucket may hold parts of several.
    """
    leaves = {path: values[path] for path in bucket.paths}
    if pieces is not None and place == "module":
        return pieces.among(bucket.paths), leaves
    if not flat:
        return pieces and pieces.only(k), leaves
    return pieces and pieces.flat(k, ""), {"": torch.zeros(bucket.numel, dtype=bucket.dtype)}


def send_slices(pieces: Pieces, bucket: Bucket) -> None:
    """The message of a module's bucket: all slices of other ranks at once."""
    sizes = [sum(stop - start for start, stop in of.values()) for of in pieces.slices_of_all]
    give, take = [0, *sizes[1:]], [0, *(sizes[0] for _ in sizes[1:])]
    flat = torch.zeros(sum(give), dtype=bucket.dtype)
    all_to_all_single(flat, pieces.axis, input_split_sizes=give, output_split_sizes=take)


MOST_RANKS = 2**20


class Counting:
    """A step without data, whose parts are run over axes that only record the messages.

    Args:
        pipeline: A pipeline, or a hook alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        layout: A function from a dict path -> leaf to buckets.
        buffers: The buffers.
        on_buffers: The transform of the buffers, if any.
        pieces: A function from a dict path -> leaf to the pieces that ranks own, for a pipeline that shards.
        uses: For the buckets of a DistributedDataParallel, whose messages carry gradients only: whether the ranks agree on
            the parameters in use. None for other buckets.

    Raises:
        TypeError: neither pipeline nor transform; a leaf that is no dense tensor.
        ValueError: axes that no mesh can have.
    """

    def __init__(
        self,
        pipeline: Pipeline | Transform,
        params: Tree,
        axes: Mapping[str, int],
        layout: Callable[[dict[str, Tensor]], tuple[Bucket, ...]],
        buffers: Mapping[str, Tensor] | None = None,
        on_buffers: Transform | None = None,
        uses: bool | None = None,
        pieces: Callable[[dict[str, Tensor]], Pieces] | None = None,
    ) -> None:
        self.pipeline, self.sizes = pipeline, axis_sizes(axes, MOST_RANKS)
        if not isinstance(pipeline, (Pipeline, Transform)):
            raise TypeError(f"explain takes a pipeline or a transform, got {pipeline!r}")
        self.hook: Transform = pipeline.hook if isinstance(pipeline, Pipeline) else pipeline
        self.optimizer = pipeline.optimizer if isinstance(pipeline, Pipeline) else None
        self.parts: Parts = parts_of(pipeline, on_buffers)
        self._place: Place = "buckets" if uses is None else "module"
        self.uses: bool = bool(uses)
        for path, leaf in named_leaves(params).items():
            check_dense(f"params[{path!r}]", leaf)
        self._notes: list[Message] = []
        self._recorders = {name: Recorder(name, n, self._notes, self.sizes) for name, n in self.sizes.items()}
        paths, leaves, _ = flatten_in_insertion_order(params)
        self.pieces: Pieces | None = None
        with self.running():
            self.params = {path: torch.zeros(p.shape, dtype=p.dtype) for path, p in zip(paths, leaves, strict=True)}
            self.pieces = pieces(self.params) if pieces else None
            # The values that this rank steps.
            self.own: dict[str, Tensor] = self.pieces.own(self.params) if self.pieces else self.params
            self._buffers = {path: torch.zeros(b.shape, dtype=b.dtype) for path, b in (buffers or {}).items()}
            in_buckets = self.pieces.buckets if self.pieces and self._place == "buckets" else None
            self.layout = in_buckets or layout(self.params)
            self._slots: Any = {} if self.optimizer is None else self.optimizer.init(self.own)
        self.plan = make_plan(self.hook, self.sizes, *self.parts.ends)
        in_module = self._place == "module"
        self._dtype = torch.float64 if in_module else words_dtype(bucket.dtype for bucket in self.layout)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context without data, with the axes bound."""
        with torch.device("meta"), bind_axes(self._recorders), bind_pieces(self.pieces), torch.no_grad():  # type: ignore[arg-type]
            yield

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes.get(name, 1) for name in axes)

    def records(self, step: int) -> Records:
        """What the ranks sum in a step beside their gradients."""
        return records_of(self.plan, self.parts, step, self._place)

    def sent(self, part: Callable[..., object], *args: Any) -> tuple[Message, ...]:
        """The messages of a part of the step: of one of the methods below."""
        del self._notes[:]
        part(*args)
        return tuple(self._notes)

    def values(self, on: str, position: int = 0) -> Tree:
        """The values of a stage of the hook, or of the transform at the end of a step."""
        if on == "buffers":
            return self._buffers
        if on == "hook":
            behind = self.pieces is not None and any(part.sharded_over for part in stages(self.hook)[:position])
            return self.own if behind else self.params
        return masters_of(self.own, self._slots) if on == "params" else state_fields(self._slots)

    # -- the parts of a step ----------------------------------------------------------------------

    def stage(self, i: int, step: int) -> None:
        """Run the i-th stage of the hook in a step."""
        parts = stages(self.hook)
        part, count = parts[i], len(stages(self.plan.early)) if self.plan.early is not None and self.layout else 0
        values = self.values("hook", i)
        sharded = {"sharded_over": self.pieces.axis} if self.pieces is not None and values is self.own else {}
        call = Call(None, step).inside(**sharded)
        for axes in self.plan.reduced(step).shares:  # the ranks have agreed on these
            call.agreed(axes, totals_of(1.0, 1.0))
        for before in parts[:i]:
            call = behind(before, call)
        if part is self.plan.reduce:
            self._reduce(part)
        elif part is self.plan.clip and not (sharded and self._place == "module"):
            pass  # the step knows the norm itself; of pieces it is in the message that says whether they are finite
        elif i < count:
            self._update_buckets(part, values, call)
        else:
            params = self.own if values is self.own else self.params
            run_stage(part, values, params, part.init(values), call)

    def record(self, axes: tuple[str, ...]) -> None:
        """Send a record in a message of its own."""
        if self._ranks(axes) > 1:
            psum(self._words(axes), axes)

    def used(self) -> None:
        """Agree on the parameters in use."""
        if self._ranks(tuple(self.sizes)) > 1:
            psum(torch.zeros(len(self.params)), tuple(self.sizes))

    def verdict_on_pieces(self, axis: str) -> None:
        """Agree on whether all pieces are finite, and on their norm."""
        if self._ranks((axis,)) > 1:
            psum(torch.zeros(2, dtype=torch.float64), axis)

    def end(self, part: Transform, on: str, step: int) -> None:
        """Run a transform at the end of a step."""
        values = self.values(on)
        sharded = None if self.pieces is None or on == "buffers" else self.pieces.axis
        call = Call(step=step).inside(persistent=True, sharded_over=sharded)
        run_stage(part, values, self.params, part.init(values), call)

    def gather(self) -> None:
        """Give all ranks the parameters that each has stepped."""
        if isinstance(self.pipeline, Pipeline) and self.pipeline.sharding and self.pieces:
            sharding, slots = self.pipeline.sharding, self._slots
            sharding.gather(self.pieces, self.params, self.own, slots, sharding.init(self.pieces, self.own, slots))

    # -- the messages of a hook -------------------------------------------------------------------

    def _words(self, axes: tuple[str, ...]) -> Tensor:
        """The record in a message of its own."""
        count = len(record_names(self._ranks(axes))) * words_per_scalar(self._dtype)
        return torch.zeros(count, dtype=self._dtype)

    def _update_buckets(self, part: Transform, values: Tree, call: Call) -> None:
        """Run a stage bucket by bucket."""
        assert self.plan.early is not None
        flat = takes_flat(self.plan.early) and not (self._place == "module" and self.pieces)
        full = part.init(values)
        for k, bucket in enumerate(self.layout):
            pieces, some = in_bucket(k, bucket, values, self.pieces, self._place, flat)
            with bind_pieces(pieces):
                if flat:
                    some = pieces.own(some) if pieces and call.sharded_over else some
                    state = part.init(some)
                else:
                    state = restrict(full, self.params, some)
                run_stage(part, some, some, state, call)

    def _reduce(self, part: Transform) -> None:
        """Run a plain reduction; one of its messages carries the record, if there is a bucket for it."""
        assert part.reduces is not None
        in_module, axis = self._place == "module", part.reduces.axis
        carrier = None if in_module or part.sharded_over else record_bucket(self.layout)
        words = self._words(names(axis))
        if carrier is None and not in_module:
            psum(words, axis)
        call = Call()
        call.agreed(names(axis), totals_of(1.0, 1.0))
        for i, bucket in enumerate(self.layout):
            if in_module and self.pieces is not None:
                send_slices(self.pieces.among(bucket.paths), bucket)
                continue
            pieces, some = in_bucket(i, bucket, self.params, self.pieces, self._place, True)
            if i == carrier:  # behind the gradients, in the same buffer
                some = {"": torch.cat([some[""], words])}
            with bind_pieces(pieces):
                part.run(some, part.init(some), some, call)
