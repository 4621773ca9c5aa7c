"""Stores of kept results: pinned memory of the host, codecs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..base import current_stream, new_stream
from ..codecs import Codec, encode_rows


class Handle:
    """A value that waits elsewhere.

    Attributes:
        where: "cpu", or the name of the codec.
        held: Bytes on the device that wait in its place.
    """

    where: str
    held = 0

    def get(self) -> Tensor:
        """The value, on its device again; a new tensor on each call."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let what follows on the device wait until the value may be written into."""


def is_abstract(x: Tensor) -> bool:
    """Whether a tensor has no values."""
    return x.device.type == "meta" or isinstance(x, FakeTensor)


class Abstract(Handle):
    """A tensor without values, which could wait elsewhere."""

    def __init__(self, x: Tensor, where: str, held: int = 0) -> None:
        self._x, self.where, self.held = x.detach(), where, held

    def get(self) -> Tensor:
        return self._x.clone()


# Of values that were moved together.
_Group: TypeAlias = "list[weakref.ref[_InHost]]"


class _InHost(Handle):
    """A value in pinned memory; the first one of its group to come back brings the group, and the one before it."""

    where = "cpu"

    def __init__(self, x: Tensor, stream: Any, group: _Group, before: _Group) -> None:
        self._device, self._stream, self._groups = x.device, stream, (group, before)
        with stream:
            self._host = torch.empty_like(x, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = stream.record_event()
        x.record_stream(stream)  # its memory is not used again before the copy has ended
        self._back: tuple[Tensor, Any] | None = None

    def settle(self) -> None:
        current_stream(self._device).wait_event(self._copied)

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
        current = current_stream(self._device)
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

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        before, group = getattr(self._last, "group", []), list[Any]()
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
                out.append(Abstract(x, "cpu") if is_abstract(x) else _InHost(x, self._stream(x.device), group, before))
        group += [weakref.ref(x) for x in out if isinstance(x, _InHost)]
        if group:
            self._last.group = group
        return out

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        self._streams[device].wait_stream(current_stream(device))
        return self._streams[device]


HOST = Host()
Offload: TypeAlias = "str | Codec"  # "cpu": pinned memory of the host; a codec: bytes in its form
Store: TypeAlias = "Host | Coded"


def store_for(offload: Offload) -> Store:
    """The store for an argument of `remat`.

    Raises:
        TypeError: neither "cpu" nor a codec.
        ValueError: a stochastic codec.
    """
    if isinstance(offload, Codec):
        if offload.stochastic:
            raise ValueError(
                f"remat: offload must be a codec that rounds to the nearest, such as tx.int8(), got {offload!r}"
            )
        return Coded(offload)
    if isinstance(offload, str) and offload == "cpu":
        return HOST
    raise TypeError(f"remat: offload must be 'cpu' or a codec such as tx.int8(), got {offload!r}")


class _Codes(Handle):
    def __init__(self, x: Tensor, codec: Codec, codes: Tensor) -> None:
        self._like, self._device, self._codec, self._codes = torch.empty_like(x, device="meta"), x.device, codec, codes
        self.where, self.held = codec.spec.name, codes.nbytes

    def get(self) -> Tensor:
        like = self._like
        found = self._codec.decode(self._codes, like.numel()).to(like.dtype).view(like.shape)
        return torch.empty_like(like, device=self._device).copy_(found)


class Coded:
    """The codes of a codec, in the memory of the device; `put` as that of the host."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        with torch._C.DisableTorchFunction():  # a region around this one does not take it for a part of its function
            return [self._put(x) if x.is_floating_point() and x.numel() else x for x in values]

    def _put(self, x: Tensor) -> Handle:
        codec, n = self._codec, x.numel()
        if is_abstract(x):
            return Abstract(x, codec.spec.name, codec.width(n))
        rows = x.detach().to(torch.float32).reshape(1, n)
        return _Codes(x, codec, encode_rows(codec, rows, 0))
