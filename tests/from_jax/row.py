"""A row of the table."""

from __future__ import annotations

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
