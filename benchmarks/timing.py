"""How long a call takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(run: Callable[[], Any], blocks: int, calls: int = 1, between: Callable[[], Any] = lambda: None) -> float:
    """Of one call, the median of several blocks of calls; `between` runs before each block, and is not counted."""
    times = []
    for _ in range(blocks):
        between()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
