"""The fingerprint of transforms, which ranks compare."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ._spec import encode


def fingerprint(*parts: Any) -> str:
    """A short hash of transforms and plain data, equal on two ranks iff the parts are.

    Functions are compared by qualified name, code and default arguments, not by the variables in their closures;
    partials by their arguments too.

    Args:
        parts: Transforms, optimizers, schedules, pipelines, numbers, strings, tuples and dicts of them.

    Returns:
        32 hexadecimal digits.

    >>> from fjoin import transforms as tx
    >>> tx.fingerprint(tx.identity()) == tx.fingerprint(tx.clip_by_value(1.0))
    False
    """
    text = json.dumps([encode(part, functions=True) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
