"""What a rank sends over the axes of a mesh, and how long its host waits for messages."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import profiler

from ..transforms.axes import Message, sent_bytes


class Sent(NamedTuple):
    """A message of this rank."""

    message: Message
    stage: str  # what it is sent for
    launched_ns: int  # by time.perf_counter_ns


# The recorders of traces: of one thread, which is a simulated rank, or of all threads, under 0.
TIMELINES: dict[int, Any] = {}


def timeline() -> Any:
    """The timeline of this rank; None if no trace is recorded."""
    return (TIMELINES.get(threading.get_ident()) or TIMELINES.get(0)) if TIMELINES else None


class Traffic:
    """Counts the messages of one rank, and names parts of its program in traces.

    Attributes:
        messages: Their number.
        sent_bytes: The bytes that it has sent, as `explain` counts them.
        waited_ns: Nanoseconds for which the host has waited for messages.
        stage: What the next messages are sent for.
    """

    def __init__(self) -> None:
        self.messages = self.sent_bytes = self.waited_ns = 0
        self.stage = ""

    def launched(self, op: str, axis: str, x: Tensor, ranks: int, arg: Any, rank: int) -> AbstractContextManager[None]:
        """Count a message; the result is entered while the host waits for it.

        Args:
            op: The name of the collective in transforms.
            x: Its input on this rank, which has the form of the message.
            arg, rank: As for `sent_bytes`.
        """
        payload = x.numel() * x.element_size()
        sent = sent_bytes(op, payload, ranks, arg, rank)
        self.messages += 1
        self.sent_bytes += sent
        message = None
        if TIMELINES:
            message = Sent(Message(op, axis, x.dtype, payload, sent), self.stage, time.perf_counter_ns())
        return _Waiting(self, message)

    def span(self, name: str) -> Span:
        """A context for a part of the program, which traces and torch's profiler show by this name."""
        return _Shown(self, name, timeline()) if TIMELINES or profiler._is_profiler_enabled else NO_SPAN


class Span:
    """A part of the program, at which nobody looks."""

    def __enter__(self) -> Span:
        return self

    def next(self, name: str) -> None:
        """End the part inside this one, and begin another one."""

    def __exit__(self, *error: object) -> None:
        pass


NO_SPAN = Span()


class _Waiting:
    """A context in which the host waits for a message."""

    __slots__ = ("_begun_ns", "_sent", "_traffic")

    def __init__(self, traffic: Traffic, sent: Sent | None) -> None:
        self._traffic, self._sent = traffic, sent

    def __enter__(self) -> None:
        self._begun_ns = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        ended_ns = time.perf_counter_ns()
        self._traffic.waited_ns += ended_ns - self._begun_ns
        sent, self._sent = self._sent, None
        if sent is not None and (line := timeline()) is not None:
            line.message(sent, self._begun_ns, ended_ns)


class _Shown(Span):
    """A part of the program of which a timeline is told, or torch's profiler."""

    def __init__(self, traffic: Traffic, name: str, line: Any) -> None:
        self._traffic, self._name, self._line = traffic, name, line
        self._record = profiler.record_function(f"fjoin/{name}") if line is None else None
        self._inner: _Shown | None = None

    def __enter__(self) -> Span:
        if self._record is not None:
            self._record.__enter__()
        self._outer, self._traffic.stage = self._traffic.stage, self._name
        self._begun_ns = time.perf_counter_ns()
        return self

    def next(self, name: str) -> None:
        """End the part inside this one, and begin another one."""
        self._end()
        self._inner = _Shown(self._traffic, name, self._line)
        self._inner.__enter__()

    def _end(self) -> None:
        if self._inner is not None:
            self._inner.__exit__()
            self._inner = None

    def __exit__(self, *error: object) -> None:
        self._end()
        if self._line is not None:
            self._line.span(self._name, self._begun_ns, time.perf_counter_ns())
        if self._record is not None:
            self._record.__exit__(None, None, None)
        self._traffic.stage = self._outer
