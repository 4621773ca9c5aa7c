"""The handle of a collective whose results are still to be decoded."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(NamedTuple):
    """A message under way."""

    work: Any  # torch's handle; None where nothing travels
    read: Callable[[], Tensor]  # when it has arrived: the floats of all ranks, one after the other


class EncodedWork(dist.Work):
    """A message under way: `wait` decodes it into the caller's tensors, then releases it.

    `is_completed` does so too, as soon as the message has arrived. Where neither is called, the tensors are never
    filled.

    Args:
        pending: The message.
        outputs: The tensors to fill, in order; further floats are left out.
        loss: The divisor of the floats, or None.
    """

    def __init__(self, pending: Pending, outputs: list[Tensor], loss: float | None) -> None:
        super().__init__()
        self._pending: Pending | None = pending
        self._outputs, self._loss = outputs, loss
        self._error: BaseException | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # type: ignore[override]
        """Wait and decode; returns True. On CUDA the current stream waits, not the host.

        Raises:
            RuntimeError: the message has failed; raised in every call. The tensors are unchanged.
        """
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        try:
            if pending.work is not None:
                pending.work.wait() if timeout is None else pending.work.wait(timeout)
            with torch.no_grad():
                floats = pending.read() if self._loss is None else pending.read() / self._loss
                sizes = [out.numel() for out in self._outputs]
                for out, values in zip(self._outputs, floats[: sum(sizes)].split(sizes), strict=True):
                    out.detach().copy_(values.view(out.shape))
        except BaseException as error:
            self._error = error.with_traceback(None)
            raise
        finally:
            del pending  # a traceback that held it would keep a broken connection open
        return True

    def is_completed(self) -> bool:
        """Whether the results are written, or the message has failed."""
        if self._pending is not None and (self._pending.work is None or self._pending.work.is_completed()):
            try:
                self.wait()
            except Exception:  # `wait` raises it
                return True
        return self._pending is None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that were filled."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future of `result()`. It waits here, since decoding in a callback would run in gloo's threads."""
        devices = {t.device for t in self._outputs if t.device.type != "cpu"}
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list(devices))
        future.set_result(self.result())
        return future
