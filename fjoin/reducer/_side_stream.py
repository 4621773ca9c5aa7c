"""A stream of a device for hooks: waiting for their messages does not delay the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..transforms import _devices
from ..transforms._axis_env import Work


class SideStream:
    """Runs functions on a side stream, after all work that the caller's stream has so far; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = _devices.new_stream(device)
        self._device = device

    def start(self, function: Callable[[], Any]) -> Work:
        """Start a function; the returned `wait` makes the current stream wait for all work started here so far."""
        self._stream.wait_stream(_devices.current_stream(self._device))
        with self._stream:
            function()
        return self

    def wait(self) -> None:
        _devices.current_stream(self._device).wait_stream(self._stream)
