"""A row of the table, and how the table is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    jax: str  # an expression
    ours: str
    why: str = ""  # where a name or a meaning differs
    exact: bool = False  # bits are compared, else up to `room`
    room: float = 1e-6
    residuals: bool = True  # of policies: whether the sizes of residuals are compared


class Section(NamedTuple):
    title: str
    kind: str  # the function that runs its rows, in theirs.py and ours.py
    intro: str
    rows: list[Row]


class Case(NamedTuple):
    kind: str
    row: Row


def table(sections: Sequence[Section]) -> str:
    """The sections of the page, in Markdown."""
    lines: list[str] = []
    for section in sections:
        lines += [f"### {section.title}", "", section.intro, "", "| jax | fjoin | why |", "| --- | --- | --- |"]
        lines += [f"| `{row.jax}` | `{row.ours}` | {row.why} |".replace("  |", " |") for row in section.rows]
        lines += [""]
    return "\n".join(lines)
