"""Steps that the host has taken and the device has not ended: after a failure their results may never be complete.

NCCL's kernels end when their group is aborted, and the kernels behind them run on with incomplete sums.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ...transforms._devices import here, is_accelerator
from ._device_wait import comes


@dataclass
class StepEnd:
    """The end of a step on a device.

    Attributes:
        failed: Why the device cannot reach it with right results; "" as long as it may.
    """

    step: int
    event: Any
    failed: str = ""


class Unfinished:
    """The ends of the newest steps on one mesh, in order."""

    def __init__(self) -> None:
        self._ends: list[StepEnd] = []

    def end(self, step: int, device: torch.device) -> StepEnd | None:
        """Note the end of a step at this place of the device's stream; None where the host and the device are one."""
        return self.add(StepEnd(step, here(device))) if is_accelerator(device) else None

    def add(self, end: StepEnd) -> StepEnd:
        self._ends = [*(one for one in self._ends if not one.event.query()), end]
        return end

    def settle(self, seconds: float, step: int | None) -> None:
        """Before messages are aborted: wait for the steps that all ranks have begun, and mark the others as failed.

        Args:
            seconds: The longest time to wait.
            step: The step in which a rank failed, where that is known: no rank ends it, or a later one.
        """
        until = time.monotonic() + seconds
        ends, self._ends = self._ends, []
        for end in ends:
            may_come = step is None or end.step < step
            if not (comes(end.event, max(until - time.monotonic(), 0.0)) if may_come else end.event.query()):
                end.failed = (
                    f"the device of this rank had not ended step {end.step} when a rank failed, and its messages never arrived, so this "
                    f"state is neither old nor new; load a checkpoint"
                )
