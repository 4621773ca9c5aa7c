"""Streams of a device for hooks: waiting for their messages does not delay the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..transforms import _devices as devices


class Started:
    """The end of a function's work in a stream."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        """Make the current stream wait for it; the host does not."""
        devices.current_stream(self._device).wait_event(self._event)


class SideStreams:
    """Runs functions on two streams in turn, each after all work that the caller's stream has so far; the host does not wait.

    While one stream waits for a bucket's message the next bucket is encoded in the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = [devices.new_stream(device) for _ in range(2)]
        self._first: Any = None  # the end of the first function of a step

    def begin(self) -> None:
        """Begin a step."""
        self._first = None

    def start(self, function: Callable[[], Any]) -> Started:
        """Start a function. All but the first of a step may read what the first has made."""
        stream = self._streams[0]
        self._streams.reverse()
        stream.wait_stream(devices.current_stream(self._device))
        if self._first is not None:
            stream.wait_event(self._first)
        with stream:
            function()
            end = devices.here(self._device)
        self._first = self._first or end
        return Started(self._device, end)
