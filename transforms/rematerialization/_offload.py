"""Kept results that wait in pinned memory of the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..base import devices


class Stashed:
    """A value that waits on the host; this class, for one without values, keeps its form alone."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach()

    def get(self) -> Tensor:
        """The value, on its device again; a new tensor on each call."""
        return self._x.clone()

    def settle(self) -> None:
        """Let what follows on the device wait until the value may be written into."""


# Of values that were moved together.
_HostGroup: TypeAlias = "list[weakref.ref[_InHost]]"


class _InHost(Stashed):
    """A value in pinned memory; the first one of its group to come back brings the group, and the one before it."""

    def __init__(self, x: Tensor, stream: Any, group: _HostGroup, before: _HostGroup) -> None:
        self._device, self._stream, self._groups = x.device, stream, (group, before)
        with stream:
            self._host = torch.empty_like(x, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = stream.record_event()
        x.record_stream(stream)  # its memory is not used again before the copy has ended
        self._back: tuple[Tensor, Any] | None = None

    def settle(self) -> None:
        devices.current_stream(self._device).wait_event(self._copied)

    def _come(self) -> tuple[Tensor, Any]:
        if self._back is None:
            with self._stream:
                back = self._host.to(self._device, non_blocking=True)
                self._back = back, self._stream.record_event()
        return self._back

    def get(self) -> Tensor:
        for group in self._groups:
            while group:  # once: those that have come and gone need not
                if (handle := group.pop(0)()) is not None:
                    handle._come()
        (back, arrived), self._back = self._come(), None
        current = devices.current_stream(self._device)
        current.wait_event(arrived)
        back.record_stream(current)
        return back


class Host:
    """Pinned memory of the host, with copies on a stream of their own.

    `put` returns handles of values that wait there; those that it does not take stay as they are.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._last = threading.local()

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Stashed]:
        before, group = getattr(self._last, "group", []), list[Any]()
        there = [x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in values]
        if there and all(there):
            raise ValueError("remat: offload='cpu' moves values to the CPU, and these are on the CPU already")
        out: list[Tensor | Stashed] = []
        for x, stays in zip(values, there, strict=True):  # kernels on a GPU have seeds on the CPU, too
            if stays:
                out.append(x)
            elif x.device.type == "meta" or isinstance(x, FakeTensor):
                out.append(Stashed(x))
            else:
                out.append(_InHost(x, self._stream(x.device), group, before))
        group += [weakref.ref(x) for x in out if isinstance(x, _InHost)]
        if group:
            self._last.group = group
        return out

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = devices.new_stream(device)
        self._streams[device].wait_stream(devices.current_stream(device))
        return self._streams[device]


HOST = Host()
