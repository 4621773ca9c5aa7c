"""JSON from files that may be damaged or hostile: a value of another kind is refused, with the place where it is."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Set
from typing import Any, NoReturn

LARGEST = 2**62
_DEEPEST = 64


class Refused(ValueError):
    """A value is not as expected. The readers of files make a CheckpointError of it, writers a TypeError."""


def refuse(where: str, value: Any, expected: str) -> NoReturn:
    raise Refused(f"{where} is {reprlib.repr(value)}, expected {expected}")


def parse(data: bytes, where: str) -> Any:
    """The value of strict JSON: no key twice, no NaN, limited nesting."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_pairs, parse_constant=_constant)
    except RecursionError:
        raise Refused(f"{where} is nested too deeply, expected at most {_DEEPEST} levels") from None
    except ValueError as error:
        raise Refused(f"{where} is not valid JSON: {error}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def whole(value: Any, where: str, low: int = 0, high: int = LARGEST) -> int:
    """An integer in [low, high]; a bool is none."""
    if type(value) is not int or not low <= value <= high:
        refuse(where, value, f"an integer from {low} to {high}")
    return value


def text(value: Any, where: str) -> str:
    if type(value) is not str:
        refuse(where, value, "a string")
    return value


def array(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        refuse(where, value, "a list")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    """An object of JSON with any keys."""
    if type(value) is not dict:
        refuse(where, value, "an object")
    for key in value:
        if type(key) is not str:
            refuse(f"a key of {where}", key, "a string")
    return value


def record(value: Any, where: str, keys: Set[str]) -> dict[str, Any]:
    """An object of JSON with exactly these keys."""
    if type(value) is not dict or value.keys() != keys:
        refuse(f"the set of keys of {where}", sorted(mapping(value, where)), f"{sorted(keys)}")
    return value


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Any value that JSON keeps as it is: finite numbers, strings, None, and lists and objects of such."""
    if depth > _DEEPEST:
        raise Refused(f"{where} is nested too deeply, expected at most {_DEEPEST} levels")
    if type(value) is list:
        for index, item in enumerate(value):
            if type(item) is not int:  # the quick case: states of generators are long lists of integers
                plain(item, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in mapping(value, where).items():
            plain(item, f"{where}[{key!r}]", depth + 1)
    elif type(value) is float:
        if not math.isfinite(value):
            refuse(where, value, "a finite number")
    elif value is not None and type(value) not in (bool, int, str):
        refuse(where, value, "a value of JSON: a number, string, bool, None, list, or dict")
    return value
