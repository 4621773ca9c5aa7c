"""Paths of parameters, chosen by glob patterns or functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from .._uncompiled import constant

Patterns: TypeAlias = str | tuple[str, ...]
Which: TypeAlias = str | Sequence[str] | Callable[[str], bool]


def check_which(name: str, which: Any, functions: bool = True) -> None:
    """Raise unless `which` is a pattern, several patterns, or, with `functions`, a function of a path.

    Raises:
        TypeError: none of these.
        ValueError: no pattern at all.
    """
    if isinstance(which, str) or (functions and callable(which)):
        return
    if not isinstance(which, (tuple, list)) or not all(isinstance(pattern, str) for pattern in which):
        other = ", or a function of a path" if functions else ""
        raise TypeError(f"{name} must be a glob pattern such as '*.bias', a tuple of them{other}, got {which!r}")
    if not which:
        raise ValueError(f"{name} is empty, so that it matches nothing, got {which!r}")


def matcher(which: Which) -> Callable[[str], bool]:
    """A function path -> bool: whether the path matches a glob pattern, one of several, or a function."""
    if isinstance(which, str):
        return lambda path: _matches(path, which)
    if callable(which):
        return which
    patterns = tuple(which)
    return lambda path: any([_matches(path, p) for p in patterns])


@constant  # Dynamo cannot trace fnmatch
def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern)
