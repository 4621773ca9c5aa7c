"""`explain`: the messages of a pipeline, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from .._check import whole_number
from .._transform import Needs, Transform, check_transform
from .._tree import Tree
from ..combinators._chain import stages
from ..layout._buckets import BUCKET_BYTES, Bucket, make_layout
from ..layout._pieces import Pieces
from ..optimizers._mixed_precision import masters_of
from ..plan._phases import Phase, changes_with_steps, phases, shown
from ..remat._residuals import saved_residuals
from ..step_param._optimizer import Optimizer
from ..step_param._state_fields import state_fields
from ._dry_run import DryRun
from ._explanation import Explanation as Explanation
from ._explanation import Message, Row
from ._pipeline import Pipeline
from ._sharding import Sharding

MOST_SHOWN = 1024  # ranks, for the time that their loads take


def explain(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    at_step: int | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    on_buffers: Transform | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
) -> Explanation:
    """The messages and the state of each stage of a pipeline, per rank and step, before anything runs.

    The stages are run once on tensors without data, over axes that only record the messages; nothing is declared by
    hand. Gradients are split into the buckets of `fjoin.train_step`, and each stage runs on a bucket or on the whole
    tree as it does there. The messages of an outer step with a delay are listed in the step in which the first begins.

    Args:
        pipeline: A `Pipeline`, or a `Transform` alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        bucket_bytes: As in `fjoin.train_step`.
        at_step: Only this step, counted from 0. By default a stage has a row for each phase with other messages, such
            as a warm-up.
        buffers, on_buffers: As in `fjoin.train_step`: the buffers, path -> tensor, and their transform.
        loss_fn, batch: As in `fjoin.train_step`; the last row then has the bytes of activations that the backward pass
            keeps, see `saved_residuals`.

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

    sharding = pipeline.sharding if isinstance(pipeline, Pipeline) else None
    pieces = None if sharding is None else functools.partial(sharding.pieces, bucket_bytes=bucket_bytes)
    found = explain_run(DryRun(pipeline, params, axes, cut, on_buffers, pieces=pieces), at_step, buffers)
    if loss_fn is None:
        return found
    given = (params, batch) if buffers is None else (params, buffers, batch)
    return found._replace(residuals=saved_residuals(loss_fn, *given))


def explain_run(run: DryRun, at_step: int | None = None, buffers: Mapping[str, Tensor] | None = None) -> Explanation:
    """`explain` for a given dry run."""
    with run.running():
        rows = _hook_rows(run, at_step)
        if run.optimizer is not None:
            rows += _lane_rows(run, at_step)
        if run.module_words:
            used = run.sum_of(torch.zeros(run.module_words), tuple(run.sizes))
            rows.append(Row("(parameters that are used)", Needs.LAYOUT, "each step", used, 0))
        if run.optimizer is not None:
            rows += _optimizer_rows(run.optimizer, run.own, run.pieces)
        if isinstance(run.pipeline, Pipeline):
            slots = run.pipeline.optimizer.init(run.own)
            rows += _end_rows(run, at_step, run.pipeline.after, masters_of(run.own, slots))
            fields = state_fields(slots)
            rows += _end_rows(run, at_step, run.pipeline.on_state, fields)
            rows += _gather_rows(run, run.pipeline.sharding, slots)
        held = {path: torch.zeros(b.shape, dtype=b.dtype) for path, b in (buffers or {}).items()}
        rows += _end_rows(run, at_step, run.on_buffers, held)
        if run.skips is not None:
            own = _state_bytes(run.skips.begin(()))
            rows.append(Row(f"{run.pipeline.spec.name or 'custom'}(...)", Needs.TREE, "each step", (), own))
    return Explanation(tuple(rows), run.sizes)


def _hook_rows(run: DryRun, at_step: int | None) -> list[Row]:
    early = run.plan.early
    count = len(stages(early)) if early is not None and run.layout else 0
    rows = []
    for i, part in enumerate(stages(run.hook)):
        rows += _rows(run, at_step, part, True, i < count)
        if part.sharded_over and run.pieces is not None:
            run.values = run.own
    return rows


def _gather_rows(run: DryRun, sharding: Sharding | None, slots: Any) -> list[Row]:
    """The messages of a sharded pipeline beside those of its stages."""
    if sharding is None or run.pieces is None:
        return []
    verdict = run.verdict()
    codec = "" if sharding.codec is None else f" by {sharding.codec!r}"
    state = _state_bytes(sharding.init(run.pieces, run.own, slots))
    return [
        Row("(whether all pieces are finite)", Needs.TREE, "each step", verdict, 0),
        Row(f"(the parameters of all ranks{codec})", Needs.LAYOUT, "each step", run.gather(), state),
    ]


def _end_rows(run: DryRun, at_step: int | None, part: Transform | None, values: Tree) -> list[Row]:
    """The rows of a transform at the end of a step, on other values than the gradients."""
    run.values, run.at_end = values, True
    return [] if part is None else [row for stage in stages(part) for row in _rows(run, at_step, stage)]


def _rows(
    run: DryRun, at_step: int | None, part: Transform, in_hook: bool = False, per_bucket: bool = False
) -> list[Row]:
    """The rows of a stage, one for each phase; `in_hook` and `per_bucket` as in `DryRun.messages`."""
    if part.parts is not None and at_step is None and changes_with_steps(part):
        return [
            row
            for one in part.parts(run.values)
            for row in _rows(run, at_step, one, in_hook and one.reduces is not None, per_bucket)
        ]
    state_bytes = _state_bytes(part.init(run.values))
    rows: list[Row] = []
    for when, step, ends in _phases(part, run.messages, at_step, run.at_end):
        messages = run.messages(part, step, in_hook, per_bucket)
        rows.append(Row(shown(part, step), part.needs, when, messages, 0 if rows else state_bytes, ends))
    return rows


def _lane_rows(run: DryRun, at_step: int | None) -> list[Row]:
    """The messages that carry only the lane."""

    def sends(hook: Transform, step: int) -> tuple[tuple[Message, ...], ...]:
        return run.lane_messages(step)

    found = _phases(run.hook, sends, at_step)
    sent = {step: run.lane_messages(step) for _, step, _ in found}
    if len(set(sent.values())) == 1:
        found = [found[0]._replace(when="each step" if at_step is None else found[0].when, ends=False)]
    return [
        Row("(the step's own counts)", Needs.LAYOUT, when, messages, 0, ends)
        for when, step, ends in found
        for messages in sent[step]
    ]


def _phases(
    part: Transform, sends: Callable[[Transform, int], Any], at_step: int | None, at_end: bool = False
) -> list[Phase]:
    return phases(part, sends, at_end) if at_step is None else [Phase(f"step {at_step}", at_step)]


def _optimizer_rows(optimizer: Optimizer, params: dict[str, Tensor], pieces: Pieces | None) -> list[Row]:
    """One row for each different optimizer, with the number of its leaves, and how evenly the ranks share them."""
    states = optimizer.init(params)
    served: dict[int, tuple[Optimizer, list[str]]] = {}
    for path in params:
        part = optimizer.at(path)
        served.setdefault(id(part), (part, []))[1].append(path)
    return [
        Row(
            repr(part),
            Needs.NOTHING if part.elementwise else Needs.LEAVES,
            _how_many(paths, params) + _how_evenly(part, paths, pieces),
            (),
            _state_bytes([states[path] for path in paths]),
        )
        for part, paths in served.values()
    ]


def _how_many(paths: list[str], params: dict[str, Tensor]) -> str:
    return "each step" if len(paths) == len(params) else f"each step, {len(paths)} of {len(params)} leaves"


def _how_evenly(part: Optimizer, paths: list[str], pieces: Pieces | None) -> str:
    if pieces is None or part.elementwise or pieces.ranks > MOST_SHOWN:
        return ""
    load = pieces.imbalance({path: part.cost(pieces.shapes[path]) for path in paths})
    return f"; the largest rank {load:.2f} x the mean"


def _state_bytes(state: Any) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in optree.tree_leaves(state) if isinstance(t, Tensor)}.values()
    )
