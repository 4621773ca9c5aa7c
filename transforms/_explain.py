"""What a pipeline will send, before it runs."""

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

from ._alternatives import alternatives, both
from ._base import Optimizer, Pipeline, Transform
from ._bucketwise import Carried, restrict
from ._combine import stages
from ._explanation import Explanation as Explanation
from ._explanation import Message, Row
from ._layout import BUCKET_BYTES, Bucket, lane_bucket, make_layout
from ._plan import make_plan, takes_flat
from ._tree import Tree, registered
from .axes._collectives import axis_size, psum
from .axes._env import bind_axes
from .axes._order import to_order
from .sync._lane import encode_lane, lane_dtype, step_lane
from .sync._mean import MeanState

# What one rank sends, in units of its payload, on an axis of n ranks.
_SENT: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "psum_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "pbroadcast": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


class Recorder:
    """An axis that notes what is sent and returns values of the right shape."""

    token: Tensor | None = None

    def __init__(self, name: str, size: int, notes: list[Message], whole: dict[str, int]) -> None:
        self.name, self.size, self._notes, self._whole = name, size, notes, whole

    def index(self) -> Tensor:
        return torch.tensor(0)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        sent = to_order(x, op == "pmax") if op in ("pmax", "pmin") else x
        payload = sent.numel() * sent.element_size()
        if op == "all_to_all_single":
            give, take = arg
            share = 1 - give[0] / max(sum(give), 1)  # what this rank keeps does not travel
            self._notes.append(Message(op, self.name, x.dtype, payload, round(payload * share)))
            return x.new_zeros(sum(take), *x.shape[1:])
        self._notes.append(Message(op, self.name, sent.dtype, payload, round(payload * _SENT[op](self.size))))
        if op == "all_gather":
            return x.new_zeros(self.size, *x.shape)
        return x.new_zeros(x.shape[1:]) if op == "psum_scatter" else torch.zeros_like(x)

    def joint(self, axes: tuple[str, ...]) -> Recorder | None:
        if axes != tuple(self._whole):
            return None
        return type(self)(" x ".join(axes), math.prod(self._whole.values()), self._notes, self._whole)


def explain(
    pipeline: Pipeline | Transform, params: Tree, axes: Mapping[str, int], *, bucket_bytes: int = BUCKET_BYTES
) -> Explanation:
    """What each stage of a pipeline sends and keeps, per rank and step, before anything runs.

    The stages are run once on tensors without data, over axes that only note what is asked of them:
    nothing is declared by hand. Gradients are cut into the buckets of `fjoin.train_step`, and each stage
    runs on a bucket or on the whole tree as it does there.

    Args:
        pipeline: A `Pipeline`, or a `Transform` alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        bucket_bytes: As in `fjoin.train_step`.

    Returns:
        An `Explanation`: `print` gives a table, `rows` the figures. `sent` assumes a ring.

    Raises:
        TypeError: neither pipeline nor transform; a stage that reads a tensor's value.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9))
    >>> what = explain(pipeline, {"w": torch.zeros(1000)}, {"data": 8})
    >>> what.messages, what.payload_bytes, what.state_bytes
    (1, 4072, 4012)
    """
    return explain_cut(pipeline, params, axes, lambda leaves: make_layout(leaves, lambda path: 0, bucket_bytes))


def explain_cut(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    cut: Callable[[dict[str, Tensor]], tuple[Bucket, ...]],
    module_words: int | None = None,
) -> Explanation:
    """`explain` for buckets that are cut in some way.

    Args:
        cut: Path -> leaf, to buckets.
        module_words: Where the buckets are those of a DistributedDataParallel, so that nothing rides behind their gradients:
            the words in which it says which parameters are used, 0 if it does not. None where they are not.
    """
    notes: list[Message] = []
    sizes = dict(axes)
    recorders = {name: Recorder(name, n, notes, sizes) for name, n in sizes.items()}
    rows: list[Row] = []
    with FakeTensorMode(allow_non_fake_inputs=True), bind_axes(recorders), torch.no_grad():  # type: ignore[arg-type]
        paths, leaves, _ = registered(params)
        fake = {path: torch.zeros(p.shape, dtype=p.dtype) for path, p in zip(paths, leaves, strict=True)}
        layout = cut(fake)
        hook, optimizer, after = _parts(pipeline)
        plan = make_plan(hook, tuple(sizes))
        ranks = math.prod(sizes.get(name, 1) for name in plan.axes)
        in_module = module_words is not None
        lane = None if in_module else dict.fromkeys(step_lane(ranks)[1:], 0.0)
        wide = torch.float64 if in_module else lane_dtype(bucket.dtype for bucket in layout)

        def explain_stage(part: Transform, when: str, carries: bool, per_bucket: bool = False) -> None:
            inner, first = alternatives(part), len(rows)
            for child, child_when in inner:
                for stage in stages(child):
                    explain_stage(stage, both(when, child_when), carries and stage.sums is not None, per_bucket)
            if inner:
                of_phases, whole = sum(row.state_bytes for row in rows[first:]), _state_bytes(part.init(fake))
                if of_phases > whole:  # they are of one state
                    rows[first:] = [row._replace(state_bytes=0) for row in rows[first:]]
                    of_phases = 0
                if whole > of_phases:
                    rows.append(Row(f"(state of {part.spec.name})", part.scope, when, (), whole - of_phases))
                return
            if part is plan.reduce:
                messages = _reduction_messages(part, layout, lane, notes)
            elif per_bucket:
                messages = _bucket_messages(part, layout, fake, lane if carries else None, wide, flat, notes)
            else:
                messages = _messages(part, fake, lane if carries else None, notes)
            rows.append(Row(repr(part), part.scope, when, messages, _state_bytes(part.init(fake))))

        early = stages(plan.early) if plan.early is not None and layout else []
        flat = plan.early is not None and takes_flat(plan.early)
        for i, part in enumerate(stages(hook)):
            explain_stage(part, "each step", plan.carries and part.sums is not None, i < len(early))
        if not plan.carries and optimizer is not None and ranks > 1:
            del notes[:]
            psum(torch.zeros(1) if lane is None else encode_lane({"total": 1.0, **lane}, wide, ranks), plan.axes)
            rows.append(Row("(the step's own counts)", "message", "each step", tuple(notes), 0))
        if module_words:
            del notes[:]
            psum(torch.zeros(module_words), tuple(sizes))
            rows.append(Row("(parameters that are used)", "message", "each step", tuple(notes), 0))
        if optimizer is not None:
            rows += _optimizer_rows(optimizer, fake)
        if after is not None:
            for part in stages(after):
                explain_stage(part, "each step", False)
        if isinstance(pipeline, Pipeline) and pipeline.skips is not None:
            own = pipeline.skips.begin(())
            rows.append(Row(f"{pipeline.spec.name or 'custom'}(...)", "tree", "each step", (), _state_bytes(own)))
    return Explanation(tuple(rows), sizes)


def _parts(pipeline: Any) -> tuple[Transform, Optimizer | None, Transform | None]:
    if isinstance(pipeline, Pipeline):
        return pipeline.hook, pipeline.optimizer, pipeline.after
    if isinstance(pipeline, Transform):
        return pipeline, None, None
    raise TypeError(f"explain takes a pipeline or a transform, got {pipeline!r}")


def _optimizer_rows(optimizer: Optimizer, params: dict[str, Tensor]) -> list[Row]:
    """One row for each different optimizer, with what it serves."""
    states = optimizer.init(params)
    served: dict[int, tuple[Optimizer, list[str]]] = {}
    for path in params:
        part = optimizer.at(path)
        served.setdefault(id(part), (part, []))[1].append(path)
    return [
        Row(repr(part), "element" if part.elementwise else "leaf", _how_many(paths, params), (), _state_bytes([states[p] for p in paths]))
        for part, paths in served.values()
    ]  # fmt: skip


def _how_many(paths: list[str], params: dict[str, Tensor]) -> str:
    return "each step" if len(paths) == len(params) else f"each step, {len(paths)} of {len(params)} leaves"


def _messages(part: Transform, params: dict[str, Tensor], lane: Any, notes: list[Message]) -> tuple[Message, ...]:
    """What a stage sends that runs on the whole tree."""
    del notes[:]
    _update(part, dict(params), part.init(params), lane=lane)
    return tuple(notes)


def _update(part: Transform, params: dict[str, Tensor], state: Any, **extra: Any) -> Any:
    try:
        return part.update(dict(params), state, params, weight=None, **extra)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TypeError(
            f"{part!r} reads a tensor's value ({error}), so that what it sends cannot be told before it runs; decide on "
            f"host integers in the state, or with torch.where"
        ) from None


def _bucket_messages(
    part: Transform,
    layout: tuple[Bucket, ...],
    params: dict[str, Tensor],
    lane: Any,
    dtype: torch.dtype,
    flat: bool,
    notes: list[Message],
) -> tuple[Message, ...]:
    """What a stage sends that runs bucket by bucket: what is common goes with the first."""
    del notes[:]
    full, carried = part.init(params), None
    for bucket in layout:
        if flat:
            some = {"": torch.zeros(bucket.numel, dtype=bucket.dtype)}
            state = part.init(some)
        else:
            some = {path: params[path] for path in bucket.paths}
            state = restrict(full, params, some)
        _, new = _update(part, some, state, lane=None if carried else lane, carried=carried, lane_dtype=dtype)
        carried = carried or Carried(functools.partial(lambda first: first, new))
    return tuple(notes)


def _reduction_messages(
    part: Transform, layout: tuple[Bucket, ...], lane: Any, notes: list[Message]
) -> tuple[Message, ...]:
    """What a plain reduction sends bucket by bucket: the lane rides in one of them, if there is one and one can."""
    assert part.reduction is not None
    del notes[:]
    carrier = None if lane is None else lane_bucket(layout)
    total = torch.ones((), dtype=torch.float64)
    axis = part.reduction.axis
    if lane is None:
        psum(total.view(1), axis)
    elif carrier is None:
        psum(encode_lane({"total": total, **lane}, lane_dtype(b.dtype for b in layout), axis_size(axis)), axis)
    for i, bucket in enumerate(layout):
        flat = {"flat": torch.zeros(bucket.numel, dtype=bucket.dtype)}
        extra = {"lane": lane} if i == carrier else {"carried": Carried(lambda: MeanState(total, {}))}
        part.update(flat, part.init(flat), flat, weight=None, **extra)
    return tuple(notes)


def _state_bytes(state: Any) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in optree.tree_leaves(state) if isinstance(t, Tensor)}.values()
    )
