"""The record of all ranks that loop together, where the hook's messages do not carry it to all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..reducer._lane import StepLane
from ..reducer._late_counts import LateCounts
from ..reducer._step_check import StepCheck
from ..reducer._step_ids import StepIds
from ..transforms.layout._buckets import Bucket
from ._state import StateData


class RecordOfAll:
    """Sends that record in messages of its own: in a step, and where a loop or a run ends.

    Args:
        lane: The record's words.
        is_apart: Whether in a step the hook reduces over fewer ranks than loop together.
    """

    def __init__(
        self,
        lane: StepLane,
        ids: StepIds,
        step_check: StepCheck,
        late_counts: LateCounts,
        is_apart: Callable[[int], bool],
    ) -> None:
        self._lane, self._ids, self._check, self._late = lane, ids, step_check, late_counts
        self._is_apart = is_apart
        self._buffers: list[Tensor] = []  # of this step and of the one before, whose message may be under way

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = []

    def send(self, values: dict[str, Any], layout: tuple[Bucket, ...]) -> Callable[[], dict[str, Any]]:
        """Start summing the record of a step.

        Returns:
            A function that waits for the sums. It must be called before the step after the next one.
        """
        lane, read_lane = self._lane, self._check.read_lane  # metrics keep `sums`, which must not keep this object
        if not self._buffers:
            self._buffers = [lane.alone(layout) for _ in range(2)]
        words = self._buffers[0]
        self._buffers.reverse()
        lane.write(lane.left_out(values, self._check.left_out), words)
        work = lane.send(words)

        @functools.cache
        def sums() -> dict[str, Any]:
            work.wait()
            return read_lane(lane, words)

        return sums

    def has_next(self, sums: Callable[[], dict[str, Any]]) -> float:
        """The number of ranks that have another batch."""
        self._check.synchronize()
        return StepCheck.host(sums())["has_next"]

    def begin_flush(self, body: StateData) -> None:
        """Check that all ranks flush after the same step, and raise for a step that some of them left out.

        The message has the size of the record that begins a step, so that a rank that steps instead receives it as such.
        Where no step sends a record of its own, ranks are never apart, and there is no message.
        """
        lane, step = self._lane, body.step
        self._check.drain()
        if not any(self._is_apart(at) for at in (step, max(step - 1, 0))):
            return
        self._raise_late(step)
        # Twice the number of a step is no step's, and the step travels as the weight.
        number = 2 * self._ids.of(-1)
        own = {**lane.complete({"bad": 0.0}), "step_id": number, "weight": float(step)}
        sums = self._sum(own, lane.alone(body.storage.layout))
        if sums["step_id"] != number * lane.ranks or sums["weight"] != step * lane.ranks:
            self._ids.refuse(
                step - 1,
                "step.flush",
                f"only some ranks have called step.flush after step {step - 1}; others have called a step, or flush after another "
                f"step. Take the same number of steps on all ranks, with step.join where their inputs differ",
            )
        self._check.raise_left_out(step - 1, sums)

    def drain(self, step: int) -> None:
        """Raise, at the end of a loop, for a last step that some ranks left out and others took.

        Args:
            step: The number of steps so far.

        Raises:
            NonFinite: on all ranks.
        """
        if self._buffers and self._is_apart(step - 1):
            self._raise_late(step)
            sums = self._sum(self._lane.complete({"bad": 0.0}), self._buffers[0])
            self._check.raise_left_out(step - 1, sums)

    def _raise_late(self, step: int) -> None:
        """Read the record of the step before, where it has not been read yet, and raise for it."""
        for late, of_all in self._late.take(step):
            sums = StepCheck.host(of_all)
            self._check.check_step(step, sums, late)  # sums on a device have not been checked yet
            self._check.raise_left_out(step - late, sums)

    def _sum(self, values: dict[str, Any], words: Tensor) -> dict[str, float]:
        """Sum a record outside a step, with the bits of the ranks that left out the last one."""
        self._lane.write(self._lane.left_out(values, self._check.left_out), words)
        self._lane.send(words).wait()
        self._check.left_out = 0.0
        return StepCheck.host(self._check.read_lane(self._lane, words))
