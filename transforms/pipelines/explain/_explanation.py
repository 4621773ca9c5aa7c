"""The result of `explain`: a table of messages and bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...remat._residuals import Residuals
from ...transform._transform import Needs
from ._plot import RANKS, plot


class Message(NamedTuple):
    """One message of one rank in one step."""

    collective: str  # its name in transforms: "psum", "all_gather", ...
    axis: str  # the axis, or several joined by " x "
    dtype: torch.dtype  # of the message
    payload_bytes: int  # the input of the collective on one rank
    sent_bytes: int  # the bytes that one rank sends in a ring


class Row(NamedTuple):
    """One stage of a pipeline in one step."""

    stage: str  # its repr
    needs: Needs
    when: str  # the steps in which it runs, or the number of its parameters
    messages: tuple[Message, ...]  # of a step in which it runs
    state_bytes: int  # the bytes that one rank keeps between steps
    ends: bool = False  # whether it stops after some step, as a warm-up does


class Explanation(NamedTuple):
    """The result of `explain`; print it, or read its rows. All figures are for one rank and one step.

    The sums of messages and bytes are for a step in which every row of `settled` runs; the sum of the state is for all
    rows.
    """

    rows: tuple[Row, ...]  # hook, optimizer, parameter transform, in this order
    axes: dict[str, int]  # name -> ranks
    residuals: Residuals | None = None  # what the backward pass keeps, where `explain` got a loss
    elsewhere: Callable[[Mapping[str, int]], Explanation] | None = None  # the explanation on other axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Explanation) and self[:3] == other[:3]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.rows)

    def __reduce__(self) -> Any:
        return Explanation, self[:3]  # without `elsewhere`, a function of the parameters

    @property
    def settled(self) -> tuple[Row, ...]:
        """The rows except those of phases that end, such as a warm-up."""
        return tuple(row for row in self.rows if not row.ends)

    @property
    def messages(self) -> int:
        return sum(len(row.messages) for row in self.settled)

    @property
    def payload_bytes(self) -> int:
        return sum(m.payload_bytes for row in self.settled for m in row.messages)

    @property
    def sent_bytes(self) -> int:
        return sum(m.sent_bytes for row in self.settled for m in row.messages)

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    def plot(self, path: str | os.PathLike[str], ranks: Sequence[int] = RANKS, axis: str | None = None) -> None:
        """Save a picture of the bytes that each stage sends per rank and step, on other numbers of ranks. It needs matplotlib.

        Args:
            path: The file, such as "bytes.png" or "bytes.svg".
            ranks: The numbers of ranks.
            axis: The axis that has them; by default the first one.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no such axis; this explanation is not from `explain`.

        >>> import os, tempfile
        >>> from fjoin import transforms as tx
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tx.explain(tx.mean("data"), {"w": torch.zeros(9)}, {"data": 8}).plot(f"{folder}/bytes.png", ranks=[2, 4])
        ...     os.listdir(folder)
        ['bytes.png']
        """
        if self.elsewhere is None:
            raise ValueError("plot needs an explanation from explain(pipeline, params, axes)")
        plot(self.elsewhere, self.axes, path, ranks, axis)

    def __str__(self) -> str:
        head = ("stage", "needs", "when", "collective", "dtype", "messages", "payload", "sent", "state")
        table: list[tuple[str, ...]] = [head]
        for row in self.rows:
            groups: dict[tuple[str, str], list[Message]] = {}
            for m in row.messages:
                groups.setdefault((f"{m.collective}({m.axis})", str(m.dtype).removeprefix("torch.")), []).append(m)
            lines = [
                (*key, str(len(ms)), _bytes(sum(m.payload_bytes for m in ms)), _bytes(sum(m.sent_bytes for m in ms)))
                for key, ms in groups.items()
            ] or [("-", "-", "0", "0 B", "0 B")]
            for i, line in enumerate(lines):
                lead = (_short(row.stage), str(row.needs), row.when) if i == 0 else ("", "", "")
                table.append((*lead, *line, _bytes(row.state_bytes) if i == 0 else ""))
        when = "" if self.settled == self.rows else "settled"
        table.append(
            (
                "total per rank and step",
                "",
                when,
                "",
                "",
                str(self.messages),
                _bytes(self.payload_bytes),
                _bytes(self.sent_bytes),
                _bytes(self.state_bytes),
            )
        )
        if self.residuals is not None:
            bytes_kept = _bytes(self.residuals.activation_bytes)
            table.append(("kept for the backward pass", "", "", "", "", "", "", "", bytes_kept))
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table
        )


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _bytes(n: int) -> str:
    value, unit = float(n), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
