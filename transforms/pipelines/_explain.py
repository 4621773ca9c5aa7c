"""`explain`: the messages of a pipeline, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import optree
from torch import Tensor

from ..base import Needs, Transform, Tree, changes_with_steps, check_transform, whole_number
from ..combinators import stages
from ..layout import Bucket, bucket_sizes, make_layout
from ..optimizers import Optimizer
from ._counting import Counting
from ._explanation import Explanation as Explanation, Row
from ._pipeline import Pipeline


def explain(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    *,
    bucket_bytes: int | None = None,
    at_step: int = 0,
    buffers: Mapping[str, Tensor] | None = None,
    on_buffers: Transform | None = None,
) -> Explanation:
    """The messages and the state of each stage of a pipeline in one step, per rank, before anything runs.

    The stages are run once on tensors without data, over axes that only record the messages; nothing is declared by
    hand. Gradients are split into the buckets of `fjoin.train_step`, and each stage runs on a bucket or on the whole
    tree as it does there. The messages of an outer step with a delay are listed in the step in which the first begins.

    Args:
        pipeline: A `Pipeline`, or a `Transform` alone.
        params: The parameters; only paths, shapes and dtypes are used.
        axes: Axis name -> number of ranks.
        bucket_bytes: As in `fjoin.train_step`; by default as is best for the device of `params`.
        at_step: The step, counted from 0. Stages with a warm-up or a period may send other messages in other steps; their
            rows say so.
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
    (1, 4080, 4004)
    """
    if bucket_bytes is not None:
        whole_number("bucket_bytes", bucket_bytes, 1)
    whole_number("at_step", at_step, 0)
    if on_buffers is not None:
        check_transform(on_buffers, "explain: on_buffers")
        if buffers is None:
            raise ValueError(f"on_buffers={on_buffers!r} was given without buffers")

    sizes = bucket_sizes(optree.tree_leaves(params), bucket_bytes)  # before the stages get tensors without data

    def cut(leaves: dict[str, Tensor]) -> tuple[Bucket, ...]:
        return make_layout(leaves, lambda path: 0, *sizes)

    sharding = pipeline.sharding if isinstance(pipeline, Pipeline) else None
    of = functools.partial(sharding.pieces, bucket_bytes=sizes[0], direct_bytes=sizes[1]) if sharding else None
    return explained(Counting(pipeline, params, axes, cut, buffers, on_buffers, pieces=of), at_step)


def explained(of: Counting, at_step: int) -> Explanation:
    """`explain` of a step without data."""
    with of.running():
        return Explanation(tuple(_rows(of, at_step)), of.sizes)


def _rows(of: Counting, step: int) -> Iterator[Row]:
    """The stages of the hook, what ranks agree on, the optimizer, and what comes after it."""
    records, pipeline = of.records(step), of.pipeline

    def when(part: Transform) -> str:
        return f"step {step}" if changes_with_steps(part) else "each step"

    def ends(part: Transform | None, on: Literal["params", "optimizer", "buffers"]) -> Iterator[Row]:
        for one in stages(part) if part is not None else ():
            state = _state_bytes(one.init(of.values(on)))
            yield Row(repr(one), one.needs, when(one), of.sent(of.end, one, on, step), state)

    for i, part in enumerate(stages(of.hook)):
        state = _state_bytes(part.init(of.values("hook", i)))
        yield Row(repr(part), part.needs, when(part), of.sent(of.stage, i, step), state)
    late = [of.plan.reduced(step).axes] if records.verdict else []
    for axes in (*records.before, *([of.plan.agree] if records.apart else []), *late):
        if sent := of.sent(of.record, axes):
            yield Row("(the step's own counts)", Needs.LAYOUT, when(of.hook), sent, 0)
    if of.uses:
        yield Row("(parameters that are used)", Needs.LAYOUT, "each step", of.sent(of.used), 0)
    if of.optimizer is not None:
        yield from _optimizer_rows(of.optimizer, of.own)
    yield from ends(of.parts.after, "params")
    yield from ends(of.parts.on_state, "optimizer")
    if records.pieces is not None:
        sent = of.sent(of.verdict_on_pieces, records.pieces)
        yield Row("(whether all pieces are finite)", Needs.TREE, "each step", sent, 0)
    if isinstance(pipeline, Pipeline) and (sharding := pipeline.sharding) is not None and of.pieces is not None:
        codec = "" if sharding.codec is None else f" by {sharding.codec!r}"
        state = _state_bytes(sharding.init(of.pieces, of.own, pipeline.optimizer.init(of.own)))
        yield Row(f"(the parameters of all ranks{codec})", Needs.LAYOUT, "each step", of.sent(of.gather), state)
    yield from ends(of.parts.on_buffers, "buffers")
    if isinstance(pipeline, Pipeline) and pipeline.skips is not None:
        own = _state_bytes(pipeline.skips.begin(()))
        yield Row(f"{pipeline.spec.name or 'custom'}(...)", Needs.TREE, "each step", (), own)


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


def _state_bytes(state: Any) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in {id(t): t for t in optree.tree_leaves(state) if isinstance(t, Tensor)}.values()
    )
