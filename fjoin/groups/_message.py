"""Messages under way, and waits for devices."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..transforms.axes import Work
from ..transforms.base import here, is_accelerator


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


# The time between two checks for failures while a message is awaited.
_LOOK_AFTER = datetime.timedelta(seconds=1)


class Copied:
    """A message under way, whose values are then copied to another tensor."""

    def __init__(self, work: Work, values: Tensor, to: Tensor) -> None:
        self._work, self._values, self._to = work, values, to

    def wait(self) -> None:
        self._work.wait()
        self._to.copy_(self._values)


class Message:
    """A message over an axis. Its wait polls for failures, so it ends where another rank has failed.

    Args:
        work: The handle of torch. The wait drops it: in a traceback it would keep a broken connection open.
        op: The name of the collective in transforms.
        sent: Its input. If it is in host memory, the host waits for it, otherwise a stream.
        after: Called when the message has arrived.
        arg: The argument of the collective.
    """

    def __init__(
        self, axis: Any, work: Any, op: str, sent: Tensor, after: Callable[[], object] = lambda: None, arg: Any = None
    ) -> None:
        self._axis, self._work, self._cpu, self._after = axis, work, sent.device.type == "cpu", after
        self._waiting = axis.traffic.launched(op, axis.name, sent, axis.size, arg, axis.rank)

    def arrived(self) -> bool:
        """Whether a message in host memory has arrived, so that `wait` would not wait."""
        return self._cpu and self._work is not None and bool(self._work.is_completed())

    def wait(self) -> None:
        work, self._work = self._work, None
        try:
            with self._waiting:
                while work is not None and not self._arrives(work):
                    self._axis.check()
        except BaseException:
            self._axis.broken = True
            raise
        finally:
            del work
        after, self._after = self._after, lambda: None
        after()

    def _arrives(self, work: Any) -> bool:
        if not self._cpu:
            work.wait()
            return True
        try:
            work.wait(_LOOK_AFTER)
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # the limit of this call; the group's own reads otherwise
                raise
            return False
        return True


class Received:
    """A collective under way; a call waits for it and returns its result."""

    def __init__(self, message: Message, out: Tensor) -> None:
        self._message, self._out = message, out
        self.arrived = message.arrived

    def __call__(self) -> Tensor:
        self._message.wait()
        return self._out


def plain(x: Tensor) -> Tensor:
    """A contiguous tensor whose memory holds its values, which that of a lazily conjugated or negated tensor does not."""
    return x.contiguous().resolve_conj().resolve_neg()
