"""What all ranks must give to a save alike."""

from __future__ import annotations

import json
from typing import Any

from ...agreement._replicas import checksum
from ..values._snapshot import Snapshot


def same(number: int, data: Any, found: Snapshot) -> dict[str, Any]:
    """Name -> JSON.

    Args:
        number: The number of steps.
        data: The loop over data, or None.
    """
    tensors = {name: value for name, value in found.values.items() if name.startswith("extra.")}
    return {
        "the number of steps": number,
        "extra": [json.dumps(found.extra), checksum(tensors)],
        "the presence of data": data is not None,
    }
