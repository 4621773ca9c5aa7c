"""Reading transforms and other objects with specs from JSON text of any origin."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ._spec import _FACTORIES, DEEPEST

LONGEST = 2**26  # characters of a text
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def from_json(text: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Builds a transform, optimizer, schedule or pipeline from its JSON text, as `to_json` writes it.

    It calls only factories registered by name, and runs no code from the text.

    Args:
        text: JSON, as returned by `to_json`; at most 2^26 characters, nested at most 100 deep.
        functions: Qualified name -> function, for those among the arguments.

    Returns:
        A transform, optimizer, schedule or pipeline, equal to the one written.

    Raises:
        TypeError: `text` is no string.
        ValueError: a text that cannot be read, with the place of the error: no JSON; an unknown factory, argument,
            function or dtype; a missing argument, or one that the factory refuses.

    >>> from_json('{"name": "clip_by_value", "args": {"max_value": 0.5}}')
    clip_by_value(0.5)
    """
    if not isinstance(text, str):
        raise TypeError(f"from_json takes the text that to_json returned, got a {type(text).__name__}")
    if len(text) > LONGEST:
        raise ValueError(f"the text has {len(text)} characters, expected at most {LONGEST}")
    try:
        node = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError(f"the text is nested too deep; a transform is nested at most {DEEPEST} deep") from None
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, 0) : error.pos + 20]
        raise ValueError(
            f"the text is no JSON: {error.msg} in line {error.lineno}, column {error.colno}, near {near!r}"
        ) from None
    except ValueError as error:  # such as a number of too many digits
        raise ValueError(f"the text cannot be read: {error}") from None
    if not isinstance(node, dict) or "name" not in node:
        raise ValueError(
            f"the text holds {_brief(node)}, expected an object with 'name' and 'args', as to_json writes it"
        )
    return _Reader(functions or {}).read(node, (), 0)


class _Reader:
    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions

    def read(self, node: Any, at: tuple[str, ...], depth: int) -> Any:
        """The value of a node; `at`: the way to it."""
        if depth > 3 * DEEPEST:  # a transform in a list in a dict
            raise ValueError(f"{_place(at)} is nested too deep; a transform is nested at most {DEEPEST} deep")
        if isinstance(node, list):
            return tuple(self.read(item, (*at, str(i)), depth + 1) for i, item in enumerate(node))
        if not isinstance(node, dict):
            return node
        kinds: dict[frozenset[str], Callable[..., Any]] = {
            frozenset({"name", "args"}): self._made,
            frozenset({"dtype"}): self._dtype,
            frozenset({"tensor", "dtype"}): self._tensor,
            frozenset({"dict"}): self._dict,
            frozenset({"function"}): self._function,
        }
        read = kinds.get(frozenset(node))
        if read is None:
            raise ValueError(
                f"{_place(at)} has the keys {sorted(node)}, expected 'name' and 'args', or 'dtype', or 'tensor' and 'dtype', or 'dict', "
                f"or 'function'"
            )
        return read(node, at, depth)

    def _made(self, node: dict[str, Any], at: tuple[str, ...], depth: int) -> Any:
        name, given = node["name"], node["args"]
        make = _FACTORIES.get(name) if isinstance(name, str) else None
        if make is None:
            raise ValueError(f"{_place(at)}: unknown transform {_brief(name)}; known: {sorted(_FACTORIES)}")
        if not isinstance(given, dict):
            raise ValueError(
                f"{_place(at)}: the 'args' of {name} are {_brief(given)}, expected an object, name -> value"
            )
        signature = inspect.signature(make)
        if unknown := sorted(given.keys() - signature.parameters.keys()):
            raise ValueError(f"{_place(at)}: {name} takes no {unknown}; it takes {list(signature.parameters)}")
        args = {key: self.read(value, (*at, "args", key), depth + 1) for key, value in given.items()}
        required = [
            key for key, p in signature.parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]
        if missing := [key for key in required if key not in args]:
            raise ValueError(f"{_place(at)}: {name} lacks {missing}")
        bound = inspect.BoundArguments(signature, {key: args[key] for key in signature.parameters if key in args})  # type: ignore[arg-type]
        try:
            return make(*bound.args, **bound.kwargs)
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{_place(at)}: {name} refuses its arguments: {error}") from error

    def _dtype(self, node: dict[str, Any], at: tuple[str, ...], depth: int) -> torch.dtype:
        name = node["dtype"]
        if not isinstance(name, str) or name not in _DTYPES:
            raise ValueError(f"{_place(at)}: unknown dtype {_brief(name)}; known: {sorted(_DTYPES)}")
        return _DTYPES[name]

    def _tensor(self, node: dict[str, Any], at: tuple[str, ...], depth: int) -> torch.Tensor:
        dtype = self._dtype(node, at, depth)
        try:
            wide = torch.tensor(node["tensor"], dtype=torch.float64 if dtype.is_floating_point else None)
            return wide.to(dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{_place(at)}: {_brief(node['tensor'])} is no tensor of {dtype}: {error}") from None

    def _dict(self, node: dict[str, Any], at: tuple[str, ...], depth: int) -> dict[Any, Any]:
        pairs = node["dict"]
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{_place(at)}: 'dict' is {_brief(pairs)}, expected a list of pairs [key, value]")
        out: dict[Any, Any] = {}
        for i, (key, value) in enumerate(pairs):
            name = self.read(key, (*at, "dict", str(i)), depth + 1)
            if not _hashable(name) or name in out:
                raise ValueError(f"{_place(at)}: {_brief(key)} is no key, or stands twice")
            out[name] = self.read(value, (*at, "dict", str(i)), depth + 1)
        return out

    def _function(self, node: dict[str, Any], at: tuple[str, ...], depth: int) -> Any:
        name = node["function"]
        function = self._functions.get(name) if isinstance(name, str) else None
        if function is None:
            raise ValueError(
                f"{_place(at)} names the function {_brief(name)}; pass it as from_json(text, functions={{{_brief(name)}: ...}})"
            )
        if not callable(function):
            raise ValueError(f"functions[{name!r}] must be a function, got {function!r}")
        return function


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the text has {sorted({n for n in names if names.count(n) > 1})} twice in one object")
    return out


def _hashable(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_hashable, key))
    return key is None or isinstance(key, (str, int)) or (isinstance(key, float) and not math.isnan(key))


def _place(at: tuple[str, ...]) -> str:
    return f"at {'.'.join(at)}" if at else "at the top"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
