"""A state dict of any depth as named tensors and JSON, and back: for modules and optimizers in torch's form."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..._errors import CheckpointError

_TENSOR, _DICT, _TUPLE, _FLOAT, _METADATA = "$tensor", "$dict", "$tuple", "$float", "$metadata"
_VERSIONS = "_metadata"  # the attribute of a module's state dict that holds the versions of its parts


def taken_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of a state dict, whose tensors are put into `tensors` by name.

    Raises:
        TypeError: a value is neither tensor nor container, nor JSON.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise ValueError(f"two tensors of the state dicts are called {name!r}; give the objects other names")
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        items = [[_key(key, name), taken_apart(one, f"{name}.{key}", tensors)] for key, one in value.items()]
        metadata = getattr(value, _VERSIONS, None)
        return {_DICT: items} | ({} if metadata is None else {_METADATA: taken_apart(dict(metadata), name, {})})
    if isinstance(value, (list, tuple)):
        parts = [taken_apart(one, f"{name}.{i}", tensors) for i, one in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{name} is a {type(value).__name__}, which cannot be saved; a state dict holds tensors, numbers, text, and containers of them"
    )


def _key(key: Any, name: str) -> Any:
    if not isinstance(key, (str, int)):
        raise TypeError(f"{name} has the key {key!r}; a state dict that is saved has text or whole numbers as keys")
    return key


def put_together(shown: Any, tensors: Mapping[str, Any]) -> Any:
    """The state dict that `taken_apart` took apart.

    Raises:
        CheckpointError: a tensor is not there.
    """
    if isinstance(shown, list):
        return [put_together(one, tensors) for one in shown]
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
    if _TUPLE in shown:
        return tuple(put_together(one, tensors) for one in shown[_TUPLE])
    found = {key: put_together(one, tensors) for key, one in shown[_DICT]}
    if _METADATA in shown:
        found = OrderedDict(found)
        setattr(found, _VERSIONS, put_together(shown[_METADATA], {}))
    return found
