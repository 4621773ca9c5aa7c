"""Objects as JSON, with their tensors apart."""

from __future__ import annotations

import math
import reprlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._errors import CheckpointError

_TENSOR, _DICT, _TUPLE, _FLOAT, _METADATA = "$tensor", "$dict", "$tuple", "$float", "$metadata"
_VERSIONS = "_metadata"  # the attribute of a module's state dict that holds the versions of its parts


def taken_apart(value: Any, name: str, tensors: dict[str, Tensor], plain: bool = False) -> Any:
    """The JSON of a state dict, whose tensors are put into `tensors` by name.

    Args:
        plain: Whether only tensors, and numbers that are not finite, have a form of their own in it: a tuple becomes a
            list.

    Raises:
        TypeError: a value is neither tensor nor container, nor JSON.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise ValueError(f"two tensors would be called {name!r}; give the objects, or the keys, other names")
        tensors[name] = value.detach() if value.requires_grad else value
        return {_TENSOR: name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str if plain else (str, int)) or (plain and key in (_TENSOR, _FLOAT)):
                expected = f"text other than {_TENSOR!r} and {_FLOAT!r}" if plain else "text or a whole number"
                raise TypeError(f"{name} has the key {key!r}, expected {expected}")
        items = [[key, taken_apart(one, f"{name}.{key}", tensors, plain)] for key, one in value.items()]
        if plain:
            return dict(items)
        metadata = getattr(value, _VERSIONS, None)
        return {_DICT: items} | ({} if metadata is None else {_METADATA: taken_apart(dict(metadata), name, {})})
    if isinstance(value, (list, tuple)):
        parts = [taken_apart(one, f"{name}.{i}", tensors, plain) for i, one in enumerate(value)]
        return parts if plain or isinstance(value, list) else {_TUPLE: parts}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}  # of numpy's numbers too, whose own text says more
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    what = f"{reprlib.repr(value)}, a {type(value).__name__}"
    raise TypeError(f"{name} is {what}, which cannot be saved; keep tensors, numbers, text, and containers of them")


def references(names: dict[str, str]) -> Any:
    """What `taken_apart` returns for a dict of tensors of these names, by key."""
    return {_DICT: [[key, {_TENSOR: name}] for key, name in names.items()]}


def put_together(shown: Any, tensors: Mapping[str, Any], plain: bool = False) -> Any:
    """What `taken_apart` took apart, with the same `plain`.

    Raises:
        CheckpointError: a tensor is not there.
    """
    if isinstance(shown, list):
        return [put_together(one, tensors, plain) for one in shown]
    if not isinstance(shown, dict):
        return shown
    if _TENSOR in shown:
        name = shown[_TENSOR]
        if name not in tensors:
            raise CheckpointError(
                f"there is no value {name}: what fresh= names must have a value at the start; name less of it"
            )
        return tensors[name]
    if _FLOAT in shown:
        return float(shown[_FLOAT])
    if plain:
        return {key: put_together(one, tensors, plain) for key, one in shown.items()}
    if _TUPLE in shown:
        return tuple(put_together(one, tensors) for one in shown[_TUPLE])
    found = {key: put_together(one, tensors) for key, one in shown[_DICT]}
    if _METADATA in shown:
        found = OrderedDict(found)
        setattr(found, _VERSIONS, put_together(shown[_METADATA], {}))
    return found
