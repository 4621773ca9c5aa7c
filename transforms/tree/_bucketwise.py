"""A transform on one bucket of parameters at a time.

Law: the merged results of the calls on all buckets equal one call on the whole tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ._tree import State


def restrict(state: State, paths: Collection[str], chosen: Collection[str]) -> State:
    """A state without the parameters that are not chosen.

    Args:
        state: A state whose values for parameters are in dicts keyed by their paths.
        paths: The paths of all parameters.
        chosen: The paths to keep.

    >>> restrict(({"a": 1, "b": 2}, 3), ["a", "b"], ["b"])
    ({'b': 2}, 3)
    """
    return _zip([state], lambda dicts: {p: v for p, v in dicts[0].items() if p in chosen}, set(paths))


def only(state: State, paths: Collection[str], path: str, name: str) -> State:
    """A state of one path alone, under another name.

    >>> only(({"a": 1, "b": 2}, 3), ["a", "b"], "b", "c")
    ({'c': 2}, 3)
    """
    return _zip([state], lambda dicts: {name: dicts[0][path]} if path in dicts[0] else {}, set(paths))


def merge(states: Sequence[State], paths: Collection[str]) -> State:
    """One state from the states of all buckets; common values are taken from the first.

    >>> merge([({"a": 1}, 3), ({"b": 2}, 3)], ["a", "b"])
    ({'a': 1, 'b': 2}, 3)
    """
    return _zip(list(states), lambda dicts: {p: v for part in dicts for p, v in part.items()}, set(paths))


def _zip(states: list[State], join: Callable[[list[dict[str, Any]]], dict[str, Any]], paths: set[str]) -> State:
    """Merge states of one form; `join` merges the dicts keyed by paths."""
    first = states[0]
    if isinstance(first, dict):
        if any(state for state in states) and all(state.keys() <= paths for state in states):
            return join(states)
        # Some states may lack a name, such as a name of the lane, which the first call adds.
        return {key: _zip([state[key] for state in states if key in state], join, paths) for key in first}
    if isinstance(first, (tuple, list)):
        children = [_zip(list(column), join, paths) for column in zip(*states, strict=True)]
        return type(first)(*children) if hasattr(first, "_fields") else type(first)(children)
    return first
