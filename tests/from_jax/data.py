"""What the rows of the table are run on, on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np

_random = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _random.normal(size=shape).astype(np.float32)


X, W = _normal(64, 3), _normal(3)  # of all ranks, (8, 3) of each
SMALL = {"a": _normal(3, 4), "b": _normal(4)}
BLOCK, BLOCK_X = {"a": 0.3 * _normal(4, 6), "b": 0.3 * _normal(6, 3)}, _normal(2, 5, 4)
TREE = {"b": [2.0, None], "a": (1.0, 3.0)}
PARAMS = {"w": _normal(4, 5), "b": _normal(3, 3)}
_GRADS = [{"w": _normal(4, 5), "b": _normal(3, 3)} for _ in range(6)]


def gradients(nan: bool = False) -> list[Any]:
    """Those of 6 steps."""
    if not nan:
        return _GRADS
    bad = {"w": _GRADS[2]["w"] * np.float32("nan"), "b": _GRADS[2]["b"]}
    return [*_GRADS[:2], bad, *_GRADS[3:]]
