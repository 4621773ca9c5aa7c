"""`explain`: the messages of a pipeline, before it runs; its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import optree
from torch import Tensor

from ..axes import Message
from ..base import Transform, Tree, check_transform, whole_number
from ..layout import bucket_sizes
from ._counting import Counting, Row
from ._pipeline import Pipeline


class Explanation(NamedTuple):
    """The result of `explain`; print it, or read its rows. All figures are for one rank and one step."""

    rows: tuple[Row, ...]  # hook, optimizer, parameter transform, in this order
    axes: dict[str, int]  # name -> ranks

    @property
    def messages(self) -> int:
        return sum(len(row.messages) for row in self.rows)

    @property
    def payload_bytes(self) -> int:
        return sum(m.payload_bytes for row in self.rows for m in row.messages)

    @property
    def sent_bytes(self) -> int:
        return sum(m.sent_bytes for row in self.rows for m in row.messages)

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    def __str__(self) -> str:
        table = [("stage", "needs", "when", "collective", "dtype", "messages", "payload", "sent", "state")]
        for row in self.rows:
            groups: dict[tuple[str, str], list[Message]] = {}
            for m in row.messages:
                groups.setdefault((f"{m.collective}({m.axis})", str(m.dtype).removeprefix("torch.")), []).append(m)
            first, *others = [(*key, *_sums(some)) for key, some in groups.items()] or [("-", "-", *_sums(()))]
            stage = row.stage if len(row.stage) <= 60 else row.stage[:57] + "..."
            table.append((stage, str(row.needs), row.when, *first, _bytes(row.state_bytes)))
            table += [("", "", "", *line, "") for line in others]
        when = next((row.when for row in self.rows if row.when.startswith("step ")), "")
        sums = _sums([m for row in self.rows for m in row.messages])
        table.append(("total per rank and step", "", when, "", "", *sums, _bytes(self.state_bytes)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def _sums(messages: Sequence[Message]) -> tuple[str, str, str]:
    """The number of messages, their payloads, and what is sent."""
    payloads, sent = sum(m.payload_bytes for m in messages), sum(m.sent_bytes for m in messages)
    return str(len(messages)), _bytes(payloads), _bytes(sent)


def _bytes(n: int) -> str:
    value, unit = float(n), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


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
    return explained(Counting(pipeline, params, axes, sizes, buffers=buffers, on_buffers=on_buffers), at_step)


def explained(of: Counting, at_step: int) -> Explanation:
    """`explain` of a step without data."""
    with of.running():
        return Explanation(tuple(of.rows(at_step)), of.sizes)
