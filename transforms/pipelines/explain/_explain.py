"""`explain`: the messages of a pipeline, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import optree
from torch import Tensor

from ..._check import whole_number
from ...combinators._chain import stages
from ...layout._buckets import Bucket, bucket_sizes, make_layout
from ...layout._pieces import Pieces
from ...plan._phases import Phase, changes_with_steps, phases, shown
from ...program._ops import Agree, Ends, Gather, Op, Stages, Step
from ...remat._residuals import saved_residuals
from ...step_param._optimizer import Optimizer
from ...transform._transform import Needs, Transform, check_transform
from ...tree._tree import Tree
from .._pipeline import Pipeline
from ._counting_memory import CountingMemory
from ._explanation import Explanation as Explanation
from ._explanation import Message, Row

MOST_SHOWN = 1024  # ranks, for the time that their loads take


def explain(
    pipeline: Pipeline | Transform,
    params: Tree,
    axes: Mapping[str, int],
    *,
    bucket_bytes: int | None = None,
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
        bucket_bytes: As in `fjoin.train_step`; by default as is best for the device of `params`.
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
    if bucket_bytes is not None:
        whole_number("bucket_bytes", bucket_bytes, 1)
    if at_step is not None:
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

    def elsewhere(axes: Mapping[str, int]) -> Explanation:
        memory = CountingMemory(pipeline, params, axes, cut, buffers, on_buffers, pieces=of)
        return explain_memory(memory, at_step)._replace(elsewhere=elsewhere)

    found = elsewhere(axes)
    if loss_fn is None:
        return found
    given = (params, batch) if buffers is None else (params, buffers, batch)
    return found._replace(residuals=saved_residuals(loss_fn, *given))


def explain_memory(memory: CountingMemory, at_step: int | None = None) -> Explanation:
    """`explain` for a given memory."""
    with memory.running():
        table = _Table(memory, at_step)
        for op in memory.programs.of(at_step or 0):
            table.add(op)
        return Explanation(tuple(table.rows()), memory.sizes)


class _Table:
    """The rows of a table, from the operations of a program.

    Args:
        at_step: Only this step; None: a row for each phase of a stage.
    """

    def __init__(self, memory: CountingMemory, at_step: int | None) -> None:
        self._memory, self._at_step = memory, at_step
        self._hook: list[Row] = []
        self._agreed: list[Row] = []
        self._stepped: list[Row] = []
        self._pieces: list[Row] = []
        self._ends: list[Row] = []
        self._buffers: list[Row] = []

    def rows(self) -> list[Row]:
        """The rows: hook, what ranks agree on, optimizer, what comes after it."""
        rows = [*self._hook, *self._agreed, *self._stepped, *self._ends, *self._pieces, *self._buffers]
        pipeline = self._memory.pipeline
        if isinstance(pipeline, Pipeline) and pipeline.skips is not None:
            own = _state_bytes(pipeline.skips.begin(()))
            rows.append(Row(f"{pipeline.spec.name or 'custom'}(...)", Needs.TREE, "each step", (), own))
        return rows

    def add(self, op: Op) -> None:
        """Add the rows of an operation."""
        memory = self._memory
        if isinstance(op, Stages):
            for i, part in enumerate(op.parts):
                self._hook += self._of_stage(part, "hook", i)
        elif isinstance(op, Agree) and op.moment == "used":
            sent = memory.sent(op)
            self._agreed.append(Row("(parameters that are used)", Needs.LAYOUT, "each step", sent, 0))
        elif isinstance(op, Agree) and op.moment == "pieces":
            sent = memory.sent(op)
            self._pieces.insert(0, Row("(whether all pieces are finite)", Needs.TREE, "each step", sent, 0))
        elif isinstance(op, Step) and memory.optimizer is not None:
            self._agreed = [*self._records(), *self._agreed]
            self._stepped = _optimizer_rows(memory.optimizer, memory.own, memory.pieces)
        elif isinstance(op, Ends):
            rows = self._buffers if op.on == "buffers" else self._ends
            for part in stages(op.part):
                rows += self._of_stage(part, op.on)
        elif isinstance(op, Gather):
            self._pieces.append(self._of_gather(op))

    def _of_stage(
        self, part: Transform, on: Literal["hook", "params", "optimizer", "buffers"], at: int = 0
    ) -> list[Row]:
        """The rows of a transform of these values, one for each phase.

        Args:
            at: The position of the stage in the hook.
        """
        memory, values = self._memory, self._memory.values(on, at)

        def sent(one: Transform, step: int) -> tuple[Message, ...]:
            return memory.sent(Stages((one,)) if on == "hook" else Ends(one, on), step, at)

        if part.parts is not None and self._at_step is None and changes_with_steps(part):
            return [row for one in part.parts(values) for row in self._of_stage(one, on, at)]
        state_bytes = _state_bytes(part.init(values))
        rows: list[Row] = []
        for when, step, ends in self._phases(part, sent, on != "hook"):
            rows.append(Row(shown(part, step), part.needs, when, sent(part, step), 0 if rows else state_bytes, ends))
        return rows

    def _records(self) -> list[Row]:
        """The messages that carry only the record of a step."""
        memory = self._memory

        def sent(_: Any, step: int) -> tuple[tuple[Message, ...], ...]:
            ops = [op for op in memory.programs.of(step) if isinstance(op, Agree) and op.moment in ("begin", "verdict")]
            if memory.sums_first:  # shown with the buckets whose sums they divide
                ops = [op for op in ops if op.late or op.moment == "verdict"]
            found = [memory.sent(op) for op in ops]
            return tuple(messages for messages in found if messages)

        phases = self._phases(memory.hook, sent, False)
        of_step = {step: sent(None, step) for _, step, _ in phases}
        if len(set(of_step.values())) == 1:
            when = "each step" if self._at_step is None else phases[0].when
            phases = [phases[0]._replace(when=when, ends=False)]
        return [
            Row("(the step's own counts)", Needs.LAYOUT, when, messages, 0, ends)
            for when, step, ends in phases
            for messages in of_step[step]
        ]

    def _of_gather(self, op: Gather) -> Row:
        """The messages with the parameters that each rank has stepped."""
        memory = self._memory
        assert isinstance(memory.pipeline, Pipeline) and memory.pipeline.sharding and memory.pieces
        sharding, slots = memory.pipeline.sharding, memory.pipeline.optimizer.init(memory.own)
        codec = "" if sharding.codec is None else f" by {sharding.codec!r}"
        state = _state_bytes(sharding.init(memory.pieces, memory.own, slots))
        return Row(f"(the parameters of all ranks{codec})", Needs.LAYOUT, "each step", memory.sent(op), state)

    def _phases(self, part: Transform, sends: Callable[[Transform, int], Any], at_end: bool) -> list[Phase]:
        at = self._at_step
        return phases(part, sends, at_end) if at is None else [Phase(f"step {at}", at)]


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
