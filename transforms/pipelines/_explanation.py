"""The table of `explain`, and collectives that are counted without data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..axes import Axis, Message, sent_bytes, to_order
from ..base import Call, Needs, Transform, Tree


class Row(NamedTuple):
    """One stage of a pipeline in one step."""

    stage: str  # its repr
    needs: Needs
    when: str  # "each step", with the number of its leaves; or "step 3" where other steps may have others
    messages: tuple[Message, ...]
    state_bytes: int  # the bytes that one rank keeps between steps


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
        when = next((row.when for row in self.rows if row.when.startswith("step ")), "")
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


class Recorder(Axis):
    """An axis that records messages and returns values of the right shape."""

    def __init__(self, name: str, size: int, notes: list[Message], whole: dict[str, int]) -> None:
        self.name, self.size, self._notes, self._whole = name, size, notes, whole

    def index(self) -> Tensor:
        return torch.tensor(0, device="cpu")

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        sent = to_order(x, op == "pmax") if op in ("pmax", "pmin") else x
        payload = sent.numel() * sent.element_size()
        if op == "all_to_all_single":
            self._notes.append(Message(op, self.name, x.dtype, payload, sent_bytes(op, payload, self.size, arg)))
            return x.new_zeros(sum(arg[1]), *x.shape[1:])
        self._notes.append(Message(op, self.name, sent.dtype, payload, sent_bytes(op, payload, self.size)))
        if op == "all_gather":
            return x.new_zeros(self.size, *x.shape)
        return x.new_zeros(x.shape[1:]) if op == "psum_scatter" else torch.zeros_like(x)

    def joint(self, axes: tuple[str, ...]) -> Recorder | None:
        if axes != tuple(self._whole):
            return None
        return type(self)(" x ".join(axes), math.prod(self._whole.values()), self._notes, self._whole)


def run_stage(part: Transform, values: Tree, params: dict[str, Tensor], state: Any, call: Call) -> Any:
    """Call a stage in the step of the call.

    Raises:
        TypeError: it reads a tensor's value.
    """
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
    """The state with its host counters `step` set to this step; of windows of several calls, before their last call."""
    if hasattr(state, "before_the_end"):
        return state.before_the_end(_at(state.inner, step))
    if hasattr(state, "_fields"):
        parts = zip(state._fields, state, strict=True)
        return type(state)(*(step if name == "step" and type(v) is int else _at(v, step) for name, v in parts))
    return type(state)(_at(part, step) for part in state) if type(state) in (tuple, list) else state
