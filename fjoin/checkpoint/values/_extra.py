"""What a user keeps beside a run: JSON with tensors in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_IN_FILE = "$tensor"
_NAME = "extra"


def extra_apart(extra: Any, tensors: dict[str, Tensor]) -> Any:
    """A copy of the value as JSON; its tensors are put into `tensors` by name.

    Raises:
        TypeError: it holds something else than finite numbers, text, None, lists, tensors, and dicts with text as keys.
    """
    try:
        shown = _shown(extra, _NAME, tensors)
        kept = json.loads(json.dumps(shown, allow_nan=False))
        if kept != shown:
            raise TypeError(f"{shown!r} would be read back as {kept!r}")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"extra must be JSON, with tensors where you like: finite numbers, text, lists, and dicts with text as keys: {error}"
        ) from None
    return kept


def _shown(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if name in tensors:
            raise ValueError(f"two tensors of it would be called {name!r}; rename a key")
        tensors[name] = value.detach()
        return {_IN_FILE: name}
    if isinstance(value, dict):
        if _IN_FILE in value:
            raise ValueError(f"{name} has the key {_IN_FILE!r}, which stands for a tensor in the file; rename it")
        return {key: _shown(one, f"{name}.{key}", tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one, f"{name}.{i}", tensors) for i, one in enumerate(value)]
    return value


def extra_together(shown: Any, values: Mapping[str, Any]) -> Any:
    """The value that `extra_apart` took apart."""
    if isinstance(shown, list):
        return [extra_together(one, values) for one in shown]
    if isinstance(shown, dict):
        return (
            values[shown[_IN_FILE]]
            if _IN_FILE in shown
            else {key: extra_together(v, values) for key, v in shown.items()}
        )
    return shown
