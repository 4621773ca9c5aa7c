"""The result of `explain`: a table of messages and bytes."""

from __future__ import annotations

from typing import NamedTuple

from ...axes._sent import Message
from ...transform._transform import Needs


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
