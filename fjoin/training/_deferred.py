"""Messages that travel while later steps run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..groups._axis import GroupAxis
from ..groups._mesh import Mesh
from ..reducer._interleave import Coroutine, Interleaver


class DeferredResult:
    """The result of a function whose messages are under way."""

    def __init__(self, messages: DeferredMessages, function: Callable[[], Any], calls: int) -> None:
        self._messages, self._calls, self._age = messages, calls, 0
        self._result: list[Any] = []
        self._stages = 1  # messages of the function that have begun
        self._task = messages.run(lambda pause: self._result.append(function()))

    def advance(self) -> None:
        """Begin the next message where it is time for it, one call later."""
        self._age += 1
        # The messages of a function are spread evenly over its calls; their number is known once it has run.
        if not self._task.done and self._age < self._calls:
            due = 1 + math.floor(self._age * self._messages.stages / self._calls)
            while self._stages < due and not self._task.done:
                self._begin_next()

    def _begin_next(self) -> None:
        self._task.go_on()
        self._stages += not self._task.done

    def get(self) -> Any:
        while not self._task.done:
            self._begin_next()
        if not self._result:
            raise RuntimeError("a message under way was dropped, since its step was closed or has failed")
        self._messages.finished(self._stages)
        return self._result[0]


class DeferredMessages:
    """The messages of one step that later steps use; all ranks begin them at the same places.

    Attributes:
        stages: The number of messages that the last finished function sent, one after the other.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._interleaver: Interleaver | None = None
        self._axes = mesh.axes
        self._real = any(isinstance(axis, GroupAxis) and axis.size > 1 for axis in mesh.axes.values())
        self._running: list[DeferredResult] = []
        self.stages = 1

    @property
    def travel(self) -> bool:
        """Whether messages can travel while this process computes."""
        return self._real

    def run(self, function: Callable[[Callable[[], None]], Any]) -> Coroutine:
        if self._interleaver is None:
            self._interleaver = Interleaver(self._axes)
        return self._interleaver.start(function)

    def __call__(self, function: Callable[[], Any], calls: int) -> DeferredResult:
        """Start a function, up to its first message.

        Args:
            calls: The calls of `advance` until its result is needed.
        """
        result = DeferredResult(self, function, calls)
        self._running.append(result)
        return result

    def advance(self) -> None:
        """Begin the next messages of all functions under way; once in each step."""
        for result in self._running:
            result.advance()

    def finished(self, stages: int) -> None:
        self.stages = stages
        self._running = [result for result in self._running if not result._task.done]

    def clear(self) -> None:
        """Drop all functions under way."""
        self._running.clear()
        if self._interleaver is not None:
            self._interleaver.clear()
