"""`explain`: the messages of a pipeline, before it runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from .._axis_env import bind_axes
from .._bucketwise import FirstBucket, restrict
from .._check import axis_sizes, whole_number
from .._lane import encode_lane, lane_dtype, mask_words, step_lane
from .._transform import Needs, Transform, check_transform
from .._tree import Tree, check_dense, flatten_in_insertion_order, named_leaves
from ..axes._collectives import axis_size, psum
from ..combinators._chain import stages
from ..combinators._partition import parts_alone
from ..optimizers._optimizer import Optimizer
from ..plan._buckets import BUCKET_BYTES, Bucket, lane_bucket, make_layout
from ..plan._phases import Phase, changes_with_steps, phases, shown
from ..plan._plan import make_plan, takes_flat
from ..reductions._mean import MeanState
from ._explanation import Explanation as Explanation
from ._explanation import Message, Row
from ._pipeline import Pipeline
from ._recorder import Recorder

MOST_RANKS = 2**20


def explain(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    at_step: int | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    on_buffers: Transform | None = None,
) -> Explanation:
    """The messages and the state of each stage of a pipeline, per rank and step, before anything runs.

    The stages are run once on tensors without data, over axes that only record the messages; nothing is declared by
    hand. Gradients are split into the buckets of `fjoin.train_step`, and each stage runs on a bucket or on the whole
    tree as it does there.

    Args:
        pipeline: A `Pipeline`, or a `Transform` alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        bucket_bytes: As in `fjoin.train_step`.
        at_step: Only this step, counted from 0. By default a stage has a row for each phase with other messages, such
            as a warm-up.
        buffers, on_buffers: As in `fjoin.train_step`: the buffers, path -> tensor, and their transform.

    Returns:
        An `Explanation`: `print` gives a table, `rows` the figures. `sent` assumes a ring.

    Raises:
        TypeError: neither pipeline nor transform; a stage that reads a tensor's value; a leaf that is no dense tensor.
        ValueError: no axis, a size that is no whole number from 1, or more than 2^20 ranks; a negative step; `on_buffers` without
            buffers.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))
    >>> what = explain(pipeline, {"w": torch.zeros(1000)}, {"data": 8})
    >>> what.messages, what.payload_bytes, what.state_bytes
    (1, 4080, 4012)
    """
    whole_number("bucket_bytes", bucket_bytes, 1)
    if at_step is not None:
        whole_number("at_step", at_step, 0)
    if on_buffers is not None:
        check_transform(on_buffers, "explain: on_buffers")
        if buffers is None:
            raise ValueError(f"on_buffers={on_buffers!r} was given without buffers")

    def cut(leaves: dict[str, Tensor]) -> tuple[Bucket, ...]:
        return make_layout(leaves, lambda path: 0, bucket_bytes)

    return explain_cut(pipeline, params, axes, cut, None, at_step, buffers, on_buffers)


def explain_cut(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    cut: Callable[[dict[str, Tensor]], tuple[Bucket, ...]],
    module_words: int | None = None,
    at_step: int | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    on_buffers: Transform | None = None,
) -> Explanation:
    """`explain` for a given layout of buckets.

    Args:
        cut: A function from a dict path -> leaf to buckets.
        module_words: For the buckets of a DistributedDataParallel, whose messages carry gradients only: the number of
            words in its message about used parameters, 0 if it sends none. None for other buckets.
    """
    hook, optimizer, after = _parts(pipeline)
    notes: list[Message] = []
    sizes = axis_sizes(axes, MOST_RANKS)
    for path, leaf in named_leaves(params).items():
        check_dense(f"params[{path!r}]", leaf)
    recorders = {name: Recorder(name, n, notes, sizes) for name, n in sizes.items()}
    with FakeTensorMode(allow_non_fake_inputs=True), bind_axes(recorders), torch.no_grad():  # type: ignore[arg-type]
        run = _Run(pipeline, params, cut, sizes, module_words is not None, notes, at_step, on_buffers)
        rows = run.hook_rows(hook)
        if optimizer is not None:
            rows += run.lane_rows(pipeline.skips is not None)  # type: ignore[union-attr]
        if module_words:
            rows.append(run.message("(parameters that are used)", torch.zeros(module_words), tuple(sizes)))
        if optimizer is not None:
            rows += _optimizer_rows(optimizer, run.params)
        for part in [] if after is None else stages(after):
            rows += run.rows(part)
        if on_buffers is not None:
            run.params = {path: torch.zeros(b.shape, dtype=b.dtype) for path, b in (buffers or {}).items()}
            rows += [row for part in stages(on_buffers) for row in run.rows(part)]
        if isinstance(pipeline, Pipeline) and pipeline.skips is not None:
            own = pipeline.skips.begin(())
            rows.append(Row(f"{pipeline.spec.name or 'custom'}(...)", Needs.TREE, "each step", (), _state_bytes(own)))
    return Explanation(tuple(rows), sizes)


class _Run:
    """A step on parameters without data, in which all messages are recorded.

    Args:
        in_module: Whether the buckets are those of a DistributedDataParallel.
        notes: The list to which the axes append their messages.
        at_step: The step, or None for all steps.
    """

    def __init__(
        self, pipeline: Pipeline | Transform, params: Tree, cut: Callable[[dict[str, Tensor]], tuple[Bucket, ...]],
        sizes: dict[str, int], in_module: bool, notes: list[Message], at_step: int | None, on_buffers: Transform | None,
    ) -> None:  # fmt: skip
        paths, leaves, _ = flatten_in_insertion_order(params)
        self.params = {path: torch.zeros(p.shape, dtype=p.dtype) for path, p in zip(paths, leaves, strict=True)}
        hook, _, after = _parts(pipeline)
        self.layout, self.plan, self._notes = cut(self.params), make_plan(hook, sizes, after, on_buffers), notes
        self._sizes, self._in_module, self._at_step = sizes, in_module, at_step
        own = ("weight",) * (after is not None) if in_module else step_lane(self._ranks(self.plan.reduced(0).axes))[1:]
        self.lane = dict.fromkeys(own, 0.0) or None
        self.dtype = torch.float64 if in_module else lane_dtype(bucket.dtype for bucket in self.layout)

    def hook_rows(self, hook: Transform) -> list[Row]:
        early = self.plan.early
        count = len(stages(early)) if early is not None and self.layout else 0
        return [row for i, part in enumerate(stages(hook)) for row in self.rows(part, True, i < count)]

    def rows(self, part: Transform, in_hook: bool = False, per_bucket: bool = False) -> list[Row]:
        """The rows of a stage, one for each phase.

        Args:
            in_hook: Whether the stage is in the hook, whose messages may carry the lane.
            per_bucket: Whether the stage runs on each bucket.
        """
        if part.spec.name == "partition" and self._at_step is None and changes_with_steps(part):
            return [
                row
                for one in parts_alone(part)
                for row in self.rows(one, in_hook and one.reduces is not None, per_bucket)
            ]

        def sends(inside: Transform, step: int) -> tuple[Message, ...]:
            return self._messages(inside, step, False, False)

        found = phases(part, sends) if self._at_step is None else [Phase(f"step {self._at_step}", self._at_step)]
        state_bytes = _state_bytes(part.init(self.params))
        rows: list[Row] = []
        for when, step, ends in found:
            messages = self._messages(part, step, in_hook and self.plan.reduced(step).equal, per_bucket)
            rows.append(Row(shown(part, step), part.needs, when, messages, 0 if rows else state_bytes, ends))
        return rows

    def _ranks(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes.get(name, 1) for name in axes)

    def lane_rows(self, skips: bool) -> list[Row]:
        """The messages that carry only the lane.

        Args:
            skips: Whether non-finite steps are skipped without an error.
        """

        def sends(hook: Transform, step: int) -> tuple[tuple[str, ...], ...]:
            return self._lane_messages(step, skips)

        hook = self.plan.hook
        rows: list[Row] = []
        found = phases(hook, sends) if self._at_step is None else [Phase(f"step {self._at_step}", self._at_step)]
        sent = {step: self._lane_messages(step, skips) for _, step, _ in found}
        if len(set(sent.values())) == 1:
            found = [found[0]._replace(when="each step" if self._at_step is None else found[0].when, ends=False)]
        for when, step, ends in found:
            for axes in sent[step]:
                rows.append(self.message("(the step's own counts)", self.counts(axes), axes, when, ends))
        return rows

    def _lane_messages(self, step: int, skips: bool) -> tuple[tuple[str, ...], ...]:
        """The axes of these messages. A module's step needs fewer of them, since no loop ends in it."""
        found = self.plan.lane_messages(step)
        if self._in_module and self.plan.reduced(step).axes != self.plan.agree and skips:
            found = found[1:]
        return tuple(axes for axes in found if self._ranks(axes) > 1)

    def message(
        self, name: str, words: Tensor, axes: tuple[str, ...], when: str = "each step", ends: bool = False
    ) -> Row:
        """The row of a message of the step itself."""
        del self._notes[:]
        psum(words, axes)
        return Row(name, Needs.LAYOUT, when, tuple(self._notes), 0, ends)

    def counts(self, axes: tuple[str, ...]) -> Tensor:
        """The lane in a message of its own; in a module the weight, and a bit for each rank."""
        ranks = self._ranks(axes)
        if self._in_module:
            return torch.zeros(1 + mask_words(ranks), dtype=torch.float64)
        return encode_lane(dict.fromkeys(step_lane(ranks), 0.0), self.dtype, ranks)

    def _messages(self, part: Transform, step: int, carries: bool, per_bucket: bool) -> tuple[Message, ...]:
        del self._notes[:]
        lane = self.lane if carries else None
        if part is self.plan.reduce:
            self._reduce(part)
        elif per_bucket:
            self._update_buckets(part, step, lane)
        else:
            _update(part, self.params, part.init(self.params), step, lane=lane, lane_dtype=self.dtype)
        return tuple(self._notes)

    def _update_buckets(self, part: Transform, step: int, lane: Any) -> None:
        """Run a stage bucket by bucket; the first bucket carries the lane."""
        assert self.plan.early is not None
        flat, full, first_bucket = takes_flat(self.plan.early), part.init(self.params), None
        for bucket in self.layout:
            if flat:
                some = {"": torch.zeros(bucket.numel, dtype=bucket.dtype)}
                state = part.init(some)
            else:
                some = {path: self.params[path] for path in bucket.paths}
                state = restrict(full, self.params, some)
            own_lane = None if first_bucket else lane
            _, new = _update(part, some, state, step, lane=own_lane, first_bucket=first_bucket, lane_dtype=self.dtype)
            first_bucket = first_bucket or FirstBucket(functools.partial(lambda first: first, new))

    def _reduce(self, part: Transform) -> None:
        """Run a plain reduction; one of its messages carries the lane, if there is a lane and a bucket for it."""
        assert part.reduces is not None and part.reduces.axis is not None
        axis, total = part.reduces.axis, torch.ones((), dtype=torch.float64)
        carrier = None if self._in_module else lane_bucket(self.layout)
        if self._in_module:
            psum(total.new_ones(1 if self.lane is None else 2), axis)
        elif carrier is None:
            psum(encode_lane({"total": total, **(self.lane or {})}, self.dtype, axis_size(axis)), axis)
        for i, bucket in enumerate(self.layout):
            flat = {"flat": torch.zeros(bucket.numel, dtype=bucket.dtype)}
            extra = {"lane": self.lane} if i == carrier else {"first_bucket": FirstBucket(lambda: MeanState(total, {}))}
            part.update(flat, part.init(flat), flat, weight=None, **extra)


def _parts(pipeline: Any) -> tuple[Transform, Optimizer | None, Transform | None]:
    if isinstance(pipeline, Pipeline):
        return pipeline.hook, pipeline.optimizer, pipeline.after
    if isinstance(pipeline, Transform):
        return pipeline, None, None
    raise TypeError(f"explain takes a pipeline or a transform, got {pipeline!r}")


def _optimizer_rows(optimizer: Optimizer, params: dict[str, Tensor]) -> list[Row]:
    """One row for each different optimizer, with the number of its leaves."""
    states = optimizer.init(params)
    served: dict[int, tuple[Optimizer, list[str]]] = {}
    for path in params:
        part = optimizer.at(path)
        served.setdefault(id(part), (part, []))[1].append(path)
    return [
        Row(
            repr(part),
            Needs.NOTHING if part.elementwise else Needs.LEAVES,
            _how_many(paths, params),
            (),
            _state_bytes([states[path] for path in paths]),
        )
        for part, paths in served.values()
    ]


def _how_many(paths: list[str], params: dict[str, Tensor]) -> str:
    return "each step" if len(paths) == len(params) else f"each step, {len(paths)} of {len(params)} leaves"


def _update(part: Transform, params: dict[str, Tensor], state: Any, step: int, **extra: Any) -> Any:
    try:
        return part.update(dict(params), _at(state, step), params, weight=None, step=step, **extra)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TypeError(
            f"{part!r} reads a tensor's value ({error}), so its messages are not known before it runs; decide by "
            f"host integers in the state, or with torch.where"
        ) from None


def _at(state: Any, step: int) -> Any:
    """The state with its host counters `step` set to this step."""
    if hasattr(state, "_fields"):
        parts = zip(state._fields, state, strict=True)
        return type(state)(*(step if name == "step" and type(v) is int else _at(v, step) for name, v in parts))
    return type(state)(_at(part, step) for part in state) if type(state) in (tuple, list) else state


def _state_bytes(state: Any) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in optree.tree_leaves(state) if isinstance(t, Tensor)}.values()
    )
