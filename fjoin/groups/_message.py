"""Messages under way, and waits for devices."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..shared_memory import LOOK_S
from ..transforms.base import devices

T = TypeVar("T")


def poll(
    ask: Callable[[], T],
    seconds: float,
    check: Callable[[], None] = lambda: None,
    check_s: float = LOOK_S,
    longest_s: float = 1e-3,
) -> T | None:
    """The first answer that is true, asked for at growing intervals; None if none comes within `seconds`.

    Args:
        check: Raises where another rank has failed; called every `check_s` seconds meanwhile.
        longest_s: The longest interval. The first one is a fiftieth of it.
    """
    start, pause = time.monotonic(), longest_s / 50
    checked = start
    while not (found := ask()):
        now = time.monotonic()
        if now - start > seconds:
            return None
        if now - checked > check_s:
            check()
            checked = now
        time.sleep(pause)
        pause = min(2 * pause, longest_s)
    return found


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
        """Note the end of a step at this place of the device's stream; None if the host and the device are one."""
        return self.add(StepEnd(step, devices.here(device))) if devices.is_accelerator(device) else None

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
            if not poll(end.event.query, until - time.monotonic() if may_come else 0.0):
                late = f"had not ended step {end.step} when a rank failed, and its messages never arrived"
                state = "this state is neither old nor new; load a checkpoint"
                end.failed = f"the device of this rank {late}, so {state}"


_LOOK_AFTER = datetime.timedelta(seconds=LOOK_S)


class PendingMessage:
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
    """A collective under way; a call waits for its messages and returns the tensor that they fill."""

    def __init__(self, messages: Sequence[Any], out: Tensor) -> None:
        self._messages, self._out = messages, out

    def arrived(self) -> bool:
        """Whether all messages have arrived, so that a call would not wait."""
        return all(message.arrived() for message in self._messages)

    def __call__(self) -> Tensor:
        for message in self._messages:
            message.wait()
        return self._out


def plain(x: Tensor) -> Tensor:
    """A contiguous tensor whose memory holds its values, which that of a lazily conjugated or negated tensor does not."""
    return x.contiguous().resolve_conj().resolve_neg()
