"""`explain`: the messages of a pipeline, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import optree
from torch import Tensor

from ..base import Needs, Transform, Tree, changes_with_steps, check_transform, whole_number
from ..combinators import stages
from ..layout import Bucket, bucket_sizes, make_layout
from ..optimizers import Optimizer
from ._counting_memory import CountingMemory
from ._explanation import Explanation as Explanation, Row
from ._pipeline import Pipeline
from ._program import Agree, Ends, Gather, Op, Stages, Step


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
    return explain_memory(CountingMemory(pipeline, params, axes, cut, buffers, on_buffers, pieces=of), at_step)


def explain_memory(memory: CountingMemory, at_step: int) -> Explanation:
    """`explain` for a given memory."""
    with memory.running():
        table = _Table(memory, at_step)
        for op in memory.programs.of(at_step):
            table.add(op)
        return Explanation(tuple(table.rows()), memory.sizes)


class _Table:
    """The rows of a table, from the operations of the program of a step."""

    def __init__(self, memory: CountingMemory, step: int) -> None:
        self._memory, self._step = memory, step
        self._hook: list[Row] = []
        self._counts: list[Row] = []  # the records that ranks send beside the gradients
        self._agreed: list[Row] = []
        self._stepped: list[Row] = []
        self._pieces: list[Row] = []
        self._ends: list[Row] = []
        self._buffers: list[Row] = []

    def rows(self) -> list[Row]:
        """The rows: hook, what ranks agree on, optimizer, what comes after it."""
        rows = [*self._hook, *self._counts, *self._agreed, *self._stepped, *self._ends, *self._pieces, *self._buffers]
        pipeline = self._memory.pipeline
        if isinstance(pipeline, Pipeline) and pipeline.skips is not None:
            own = _state_bytes(pipeline.skips.begin(()))
            rows.append(Row(f"{pipeline.spec.name or 'custom'}(...)", Needs.TREE, "each step", (), own))
        return rows

    def add(self, op: Op) -> None:
        """Add the rows of an operation."""
        memory = self._memory
        if isinstance(op, Stages):
            self._hook += [self._of_stage(part, "hook", i) for i, part in enumerate(op.parts)]
        elif isinstance(op, Agree) and op.moment == "used":
            sent = memory.sent(op)
            self._agreed.append(Row("(parameters that are used)", Needs.LAYOUT, "each step", sent, 0))
        elif isinstance(op, Agree) and op.moment == "pieces":
            sent = memory.sent(op)
            self._pieces.insert(0, Row("(whether all pieces are finite)", Needs.TREE, "each step", sent, 0))
        elif isinstance(op, Agree):
            if sent := memory.sent(op, self._step):
                self._counts.append(Row("(the step's own counts)", Needs.LAYOUT, self._when(memory.hook), sent, 0))
        elif isinstance(op, Step) and memory.optimizer is not None:
            self._stepped = _optimizer_rows(memory.optimizer, memory.own)
        elif isinstance(op, Ends):
            rows = self._buffers if op.on == "buffers" else self._ends
            rows += [self._of_stage(part, op.on) for part in stages(op.part)]
        elif isinstance(op, Gather):
            self._pieces.append(self._of_gather(op))

    def _of_stage(self, part: Transform, on: Literal["hook", "params", "optimizer", "buffers"], at: int = 0) -> Row:
        """The row of a transform of these values.

        Args:
            at: The position of the stage in the hook.
        """
        memory = self._memory
        sent = memory.sent(Stages((part,)) if on == "hook" else Ends(part, on), self._step, at)
        return Row(repr(part), part.needs, self._when(part), sent, _state_bytes(part.init(memory.values(on, at))))

    def _when(self, part: Transform) -> str:
        return f"step {self._step}" if changes_with_steps(part) else "each step"

    def _of_gather(self, op: Gather) -> Row:
        """The messages with the parameters that each rank has stepped."""
        memory = self._memory
        assert isinstance(memory.pipeline, Pipeline) and memory.pipeline.sharding and memory.pieces
        sharding, slots = memory.pipeline.sharding, memory.pipeline.optimizer.init(memory.own)
        codec = "" if sharding.codec is None else f" by {sharding.codec!r}"
        state = _state_bytes(sharding.init(memory.pieces, memory.own, slots))
        return Row(f"(the parameters of all ranks{codec})", Needs.LAYOUT, "each step", memory.sent(op), state)


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
