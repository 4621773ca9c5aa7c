"""What all ranks must give to a save alike."""

from __future__ import annotations

import json
from typing import Any

from ...agreement._replicas import checksum, form
from ..values._snapshot import Snapshot


def same(number: int, data: Any, found: Snapshot) -> dict[str, Any]:
    """Name -> JSON.

    Args:
        number: The number of steps.
        data: The loop over data, or None.
    """
    extra, tensors = found.extra
    return {
        "the number of steps": number,
        "extra": [json.dumps(extra), [form(value) for value in tensors.values()], checksum(tensors.values())],
        "the presence of data": data is not None,
    }
