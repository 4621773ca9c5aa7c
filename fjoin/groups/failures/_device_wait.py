"""Waits for a device, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def comes(event: Any, seconds: float, look: Callable[[], None] = lambda: None) -> bool:
    """Whether a device reaches an event within `seconds`; `look` is called twice a second meanwhile.

    CUDA's own wait has no time limit, so the event is polled, at growing intervals.
    """
    start, pause = time.monotonic(), 2e-5
    looked = start
    while not event.query():
        now = time.monotonic()
        if now - start > seconds:
            return False
        if now - looked > 0.5:
            look()
            looked = now
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True
