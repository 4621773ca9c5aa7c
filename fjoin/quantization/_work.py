"""The handle of a collective whose results are still to be decoded."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EncodedWork(dist.Work):
    """A message under way: `wait` decodes it into the caller's tensors, then releases it.

    `is_completed` does so too, as soon as the message has arrived. Where neither is called, the tensors are never
    filled.

    Args:
        work: The message's own handle; None where nothing travels.
        fill: Writes the results to `outputs`.
        outputs: The tensors to fill.
    """

    def __init__(self, work: Any, fill: Callable[[], None], outputs: list[Tensor]) -> None:
        super().__init__()
        self._begun: tuple[Any, Callable[[], None]] | None = (work, fill)
        self._outputs = outputs
        self._error: BaseException | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # type: ignore[override]
        """Wait and decode; returns True. On CUDA the current stream waits, not the host.

        Raises:
            RuntimeError: the message has failed; raised in every call. The tensors are unchanged.
        """
        if self._error is not None:
            raise self._error
        begun, self._begun = self._begun, None
        if begun is None:
            return True
        try:
            if begun[0] is not None:
                begun[0].wait() if timeout is None else begun[0].wait(timeout)
            with torch.no_grad():
                begun[1]()
        except BaseException as error:
            self._error = error.with_traceback(None)
            raise
        finally:
            del begun  # a traceback that held it would keep a broken connection open
        return True

    def is_completed(self) -> bool:
        """Whether the results are written, or the message has failed."""
        if self._begun is not None and (self._begun[0] is None or self._begun[0].is_completed()):
            try:
                self.wait()
            except Exception:  # `wait` raises it
                return True
        return self._begun is None

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
