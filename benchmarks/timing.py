"""Timing of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(run: Callable[[], Any], blocks: int, calls: int = 1, between: Callable[[], Any] = lambda: None) -> float:
    """The seconds of one call: the median over several blocks of calls; `between` runs before each block, untimed."""
    times = []
    for _ in range(blocks):
        between()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
