"""A stream of CUDA's for hooks: waiting for their messages holds up no backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..groups._axis import Work


class SideStream:
    """Runs functions behind all that their caller has begun so far; the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)

    def start(self, function: Callable[[], Any]) -> Work:
        """Begin a function; `wait` of what is returned makes the current stream wait for all begun here so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            function()
        return self

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
