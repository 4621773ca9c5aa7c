"""Pinned memory of the host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._devices import current_stream, new_stream
from ._store import Abstract, Handle, is_abstract


class _Group:
    """Values that were moved together; they come back together, and the group before starts to."""

    def __init__(self, before: _Group | None) -> None:
        self.handles: list[weakref.ref[_InHost]] = []
        self.before = None if before is None else weakref.ref(before)
        self._came = False

    def come(self) -> None:
        """Let them come back, once: those that have come and gone need not."""
        came, self._came = self._came, True
        for ref in () if came else self.handles:
            if (handle := ref()) is not None:
                handle.prefetch()


class _InHost(Handle):
    where = "cpu"

    def __init__(self, x: Tensor, stream: Any, group: _Group) -> None:
        self._device, self._stream, self._group = x.device, stream, group
        with stream:
            self._host = torch.empty_like(x, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = stream.record_event()
        x.record_stream(stream)  # its memory is not used again before the copy has ended
        self._back: tuple[Tensor, Any] | None = None

    def settle(self) -> None:
        current_stream(self._device).wait_event(self._copied)

    def prefetch(self) -> None:
        if self._back is None:
            with self._stream:
                back = self._host.to(self._device, non_blocking=True)
                self._back = back, self._stream.record_event()

    def get(self) -> Tensor:
        self._group.come()
        if self._group.before is not None and (before := self._group.before()) is not None:
            before.come()
        self.prefetch()
        assert self._back is not None
        (back, arrived), self._back = self._back, None
        current = current_stream(self._device)
        current.wait_event(arrived)
        back.record_stream(current)
        return back


class Host:
    """Pinned memory of the host, with copies on a stream of their own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._last = threading.local()

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        last = getattr(self._last, "group", None)
        group = _Group(None if last is None else last())
        there = [x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in values]
        if there and all(there):
            raise ValueError(
                "remat: offload='cpu' moves values from an accelerator to the CPU, and these are on the CPU already; give "
                "a codec such as tx.int8()"
            )
        out: list[Tensor | Handle] = []
        for x, stays in zip(values, there, strict=True):  # kernels on a GPU have seeds on the CPU, too
            if stays:
                out.append(x)
            else:
                out.append(Abstract(x, "cpu") if is_abstract(x) else _InHost(x, self._stream(x.device), group))
        group.handles = [weakref.ref(x) for x in out if isinstance(x, _InHost)]
        if group.handles:
            self._last.group = weakref.ref(group)
        return out

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        self._streams[device].wait_stream(current_stream(device))
        return self._streams[device]


HOST = Host()
