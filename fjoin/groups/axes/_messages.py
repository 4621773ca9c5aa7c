"""Messages over an axis that are under way."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...transforms._axis_env import Work

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
