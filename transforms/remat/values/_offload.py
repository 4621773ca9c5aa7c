"""Where values wait for the backward pass, other than in the memory of their device."""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...codecs._codec import Codec
from ...codecs._rows import encode_rows
from ._pinned import HOST
from ._store import Abstract, Handle, Store, is_abstract

# "cpu": pinned memory of the host; another text or path: a folder for memory-mapped files; a codec: bytes in its form.
Offload: TypeAlias = "str | os.PathLike[str] | Codec"


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
