"""A CUDA stream for hooks: waiting for their messages does not delay the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..transforms._axis_env import Work


class SideStream:
    """Runs functions on a side stream, after all work that the caller's stream has so far; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)

    def start(self, function: Callable[[], Any]) -> Work:
        """Start a function; the returned `wait` makes the current stream wait for all work started here so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            function()
        return self

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
