"""Where values wait for the backward pass, other than in the memory of their device."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..codecs._codec import Codec
from ..codecs._rows import encode_rows

# "cpu": pinned memory of the host; another text or path: a folder for memory-mapped files; a codec: bytes in its form.
Offload: TypeAlias = "str | os.PathLike[str] | Codec"


class Handle:
    """A value that waits elsewhere.

    Attributes:
        where: "cpu", "file", or the name of the codec.
        held: Bytes on the device that wait in its place.
        size: Bytes of the value.
    """

    where: str
    size: int
    held = 0

    def get(self) -> Tensor:
        """The value, on its device again; a new tensor on each call."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let what follows on the device wait until the value may be written into."""


class Store(Protocol):
    """A place for values."""

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        """Handles of values that wait there; those that it does not take stay as they are."""


def store_for(offload: Offload) -> Store:
    """The store for an argument of `remat`.

    Raises:
        TypeError: neither "cpu", a folder nor a codec.
        ValueError: the folder does not exist.
    """
    if isinstance(offload, Codec):
        return Coded(offload)
    if isinstance(offload, str) and offload == "cpu":
        return HOST
    if isinstance(offload, (str, os.PathLike)):
        folder = Path(offload)
        if not folder.is_dir():
            raise ValueError(
                f"remat: offload must be 'cpu', a folder that exists or a codec; {str(folder)!r} is no folder"
            )
        return File(folder)
    raise TypeError(f"remat: offload must be 'cpu', the path of a folder or a codec such as tx.int8(), got {offload!r}")


def is_abstract(x: Tensor) -> bool:
    """Whether a tensor has no values."""
    return x.device.type == "meta" or isinstance(x, FakeTensor)


class Abstract(Handle):
    """A tensor without values, which could wait elsewhere."""

    def __init__(self, x: Tensor, where: str, held: int = 0) -> None:
        self._x, self.where, self.held, self.size = x.detach(), where, held, x.nbytes

    def get(self) -> Tensor:
        return self._x.clone()


# -- pinned memory ------------------------------------------------------------------------------------------------------


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
        self.size, self._device, self._stream, self._group = x.nbytes, x.device, stream, group
        with stream:
            self._host = torch.empty_like(x, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = stream.record_event()
        x.record_stream(stream)  # its memory is not used again before the copy has ended
        self._back: tuple[Tensor, Any] | None = None

    def settle(self) -> None:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._copied)

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
        current = torch.get_device_module(self._device).current_stream(self._device)
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
                "a folder for memory-mapped files, offload='/path', or a codec such as tx.int8()"
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
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        self._streams[device].wait_stream(module.current_stream(device))
        return self._streams[device]


HOST = Host()


# -- a memory-mapped file -----------------------------------------------------------------------------------------------


class _InFile(Handle):
    where = "file"

    def __init__(self, x: Tensor, pages: Tensor | None, device: torch.device) -> None:
        self._like, self._pages, self.size = torch.empty_like(x, device="meta"), pages, x.nbytes
        self._device = device

    def get(self) -> Tensor:
        like = self._like
        if self._pages is None:
            return torch.empty_like(like, device=self._device)
        flat = self._pages.view(like.dtype)
        return flat.as_strided(like.shape, like.stride()).to(self._device, copy=True)


class File:
    """Files without names in a folder, one for each value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        with torch._C.DisableTorchFunction():  # a region around this one does not take it for a part of its function
            return [Abstract(x, "file") if is_abstract(x) else self._put(x) for x in values]

    def _put(self, x: Tensor) -> _InFile:
        flat = torch.empty_like(x, device="cpu").copy_(x) if x.device.type != "cpu" or not _is_dense(x) else x
        if not x.nbytes:
            return _InFile(flat, None, x.device)
        flat_bytes: Any = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                data, done = memoryview(flat_bytes), 0
                while done < len(data):
                    done += os.write(file.fileno(), data[done:])
                pages = _mapped(file.fileno(), x.nbytes)
        except OSError as error:
            error.add_note(
                f"remat: offload to {str(self._folder)!r}: {x.nbytes} bytes of a kept value could not be written"
            )
            raise
        return _InFile(flat, pages, x.device)


def _mapped(fd: int, nbytes: int) -> Tensor:
    """The bytes of an open file, (nbytes,), in memory of its own once they are written into."""
    path = f"/proc/self/fd/{fd}"
    if os.path.exists(path):  # Python's mmap would keep a file open for each value
        return torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _is_dense(x: Tensor) -> bool:
    """Whether the tensor's elements fill one part of its memory, each once."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(x)) and not (x.is_conj() or x.is_neg())


# -- codes --------------------------------------------------------------------------------------------------------------


class _Codes(Handle):
    def __init__(self, x: Tensor, codec: Codec, codes: Tensor) -> None:
        self._like, self._device, self._codec, self._codes = torch.empty_like(x, device="meta"), x.device, codec, codes
        self.where, self.held, self.size = codec.spec.name, codes.nbytes, x.nbytes

    def get(self) -> Tensor:
        like = self._like
        found = self._codec.decode(self._codes, like.numel()).to(like.dtype).view(like.shape)
        return torch.empty_like(like, device=self._device).copy_(found)


class Coded:
    """The codes of a codec, in the memory of the device."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def put(self, values: Sequence[Tensor]) -> list[Tensor | Handle]:
        with torch._C.DisableTorchFunction():  # as in File
            return [self._put(i, x) if x.is_floating_point() and x.numel() else x for i, x in enumerate(values)]

    def _put(self, i: int, x: Tensor) -> Handle:
        codec, n = self._codec, x.numel()
        if is_abstract(x):
            return Abstract(x, codec.spec.name, codec.width(n))
        rows = x.detach().to(torch.float32).reshape(1, n)
        if codec.stochastic:
            codec = codec.keyed(_seed(rows[0]), i)
        return _Codes(x, codec, encode_rows(codec, rows, 0))


def _seed(values: Tensor) -> int:
    """A seed of random bits that is the same in the same step of a run that is resumed: of torch's generator, and the values."""
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    # The values of a device would have to be awaited.
    return zlib.crc32(values[:1024].numpy().tobytes(), state) if values.device.type == "cpu" else state
