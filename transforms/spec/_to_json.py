"""Writing transforms and other objects with specs as JSON text."""

from __future__ import annotations

import json
from typing import Any

from ._spec import Spec, encode


def to_json(transform: Any) -> str:
    """A transform, optimizer, schedule or pipeline as JSON text. A function among the arguments is written by its qualified name.

    Raises:
        TypeError: `transform` carries no spec, or an argument has no JSON form.

    >>> from fjoin import transforms as tx
    >>> print(tx.to_json(tx.clip_by_value(0.5)))
    {
     "name": "clip_by_value",
     "args": {
      "max_value": 0.5
     }
    }
    """
    if not isinstance(getattr(transform, "spec", None), Spec):
        raise TypeError(f"expected a transform, optimizer, schedule or pipeline, got {transform!r}")
    return json.dumps(encode(transform, functions=False), indent=1)
