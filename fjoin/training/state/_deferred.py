"""Messages that travel while later steps run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...groups._mesh import Mesh
from ...reducer._interleave import Coroutine, Interleaver


class _Begun:
    """A function whose messages are under way."""

    def __init__(
        self, owner: DeferredMessages, values: tuple[Tensor, ...], function: Callable[[], Any], calls: int
    ) -> None:
        self._owner, self.values, self._calls, self._age = owner, values, calls, 0
        self._result: list[Any] = []
        self._stages = 1  # messages of the function that have begun
        self.task = Coroutine(owner.interleaver(), lambda pause: self._result.append(function()))
        self.task.go_on()

    def advance(self) -> bool:
        """Begin the next message where it is time for it, one call later; returns whether the call of its use has not passed."""
        self._age += 1
        # The messages of a function are spread evenly over its calls; their number is known once one has run.
        if self._age < self._calls:
            due = 1 + math.floor(self._age * self._owner.stages / self._calls)
            while self._stages < due and not self.task.done:
                self._begin_next()
        return self._age <= self._calls

    def _begin_next(self) -> None:
        self.task.go_on()
        self._stages += not self.task.done

    def get(self) -> Any:
        while not self.task.done:
            self._begin_next()
        if not self._result:
            raise RuntimeError("a message under way was dropped, since its step has failed")
        self._owner.stages = self._stages
        return self._result[0]


class DeferredMessages:
    """The messages of one step that later steps use; all ranks begin them at the same places.

    Attributes:
        stages: The number of messages that the last finished function sent, one after the other.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._interleaver: Interleaver | None = None
        self._axes = mesh.axes
        # Whether messages can travel while this process computes.
        self.travel: bool = any(axis.travels and axis.size > 1 for axis in mesh.axes.values())
        self._begun: list[_Begun] = []
        self.stages = 1

    def interleaver(self) -> Interleaver:
        if self._interleaver is None:
            self._interleaver = Interleaver(self._axes)
        return self._interleaver

    def begin(self, values: Mapping[str, Tensor], function: Callable[[], Any], calls: int) -> None:
        """See `Prefetch`."""
        self._begun.append(_Begun(self, tuple(values.values()), function, calls))

    def result(self, values: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
        """See `Prefetch`."""
        tensors = tuple(values.values())
        for begun in self._begun:
            if len(begun.values) == len(tensors) and all(a is b for a, b in zip(begun.values, tensors, strict=True)):
                found = begun.get()
                self._begun.remove(begun)
                return found
        return function()

    def advance(self) -> None:
        """Begin the next messages of all functions under way; once in each step.

        A function whose result has not been used in time is dropped: its step has been taken again, from another state.
        """
        for begun in list(self._begun):
            if not begun.advance():
                begun.task.abandon()
                self._begun.remove(begun)

    @property
    def under_way(self) -> int:
        """The number of functions under way."""
        return len(self._begun)

    def clear(self) -> None:
        """Drop all functions under way."""
        begun, self._begun = self._begun, []
        for one in begun:
            one.task.abandon()
