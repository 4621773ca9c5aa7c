"""Checks of arguments that many functions take."""

from __future__ import annotations

from typing import Any


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value, if it is an int in a range.

    Raises:
        ValueError: it is not; a bool is none.

    >>> whole_number("steps", 3, least=1)
    3
    """
    fine = isinstance(value, int) and not isinstance(value, bool)
    if fine and (least is None or value >= least) and (most is None or value <= most):
        return value  # type: ignore[no-any-return]
    within = "" if least is None else f", at least {least}" if most is None else f" from {least} to {most}"
    raise ValueError(f"{name} must be a whole number{within}, got {value!r}")
