"""A signal as a request: its handler only sets a flag."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class OnSignal:
    """Calls functions that only set a flag when a signal arrives, such as `Requests.ask_stop`.

    The handler that was there before runs too. The signal's default action, such as SIGTERM's end of the process, does
    not. Only the main thread can install a handler: in other threads `install` does nothing.

    Attributes:
        installed: Whether the handler is installed.
    """

    def __init__(self, *asks: Callable[[], None], on: signal.Signals = signal.SIGTERM) -> None:
        self._asks, self._on = asks, on
        self._before: Any = None
        self.installed = False

    def install(self) -> None:
        """Install the handler; once."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(self._on)
        if before is None:  # a handler that is not Python's could be neither called nor put back
            return
        self._before, self.installed = before, True
        signal.signal(self._on, self._handle)

    def uninstall(self) -> None:
        """Put the old handler back, unless another one has been installed since, which may call this one: it does
        nothing then.
        """
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        self.installed = False
        if signal.getsignal(self._on) == self._handle:
            signal.signal(self._on, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for ask in self._asks if self.installed else ():
            ask()
        if callable(self._before):
            self._before(number, frame)
