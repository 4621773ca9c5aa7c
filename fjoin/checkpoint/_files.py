"""Tensors in files: the format safetensors, written durably, read back only with right checksums; errors that name the
file.

A file is the length of the header (u64, little endian), the header (JSON, padded with spaces so that the data begins at
a multiple of 8) and the data. Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CheckpointError, described

BLOCK = 4 << 20  # bytes under one checksum
DAMAGED = "the file is damaged or not of this checkpoint: use another step"
_ADVICE = {
    errno.ENOSPC: "free some space there, or choose another file system",
    errno.EDQUOT: "free some of the quota there, or choose another file system",
    errno.EACCES: "give this user the right to it",
    errno.ELOOP: "put the file or folder itself in the place of the link",
    errno.ENOENT: "the path is wrong, or not the same on all ranks, or the file was removed",
}


@dataclass(frozen=True)
class FileEntry:
    """The bytes that a file must hold.

    Attributes:
        name: The name in its folder.
        size: In bytes.
        blocks: zlib.crc32 of each 4 MiB of the file, header and padding included.
    """

    name: str
    size: int
    blocks: list[int]


@contextlib.contextmanager
def typed_errors(action: str) -> Iterator[None]:
    """An OSError inside becomes a CheckpointError that names the action and says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "look at the file system")
        raise CheckpointError(f"cannot {action}: {error}; {advice}") from error


@contextlib.contextmanager
def decoding(path: Path | str) -> Iterator[None]:
    """Any error of a value that is odd becomes a CheckpointError that names the file.

    Checksums find what happens by chance; what is decoded with a right one and is odd all the same was forged, or
    written by another program. So it is enough that an error names the file, and that nothing is read beyond it.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else described(error)  # most of them are our own
        raise CheckpointError(f"{path}: {reason}; {DAMAGED}") from error


def write_blocks(path: Path, chunks: Iterable[memoryview | bytes]) -> FileEntry:
    """Write a new file, durably. A memoryview must be of bytes."""
    size, blocks = 0, list[int]()
    with typed_errors(f"write {path}"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            for block in _in_blocks(chunks):
                blocks.append(zlib.crc32(block))
                size += len(block)
                while block:
                    block = block[os.write(fd, block) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    return FileEntry(path.name, size, blocks)


def _in_blocks(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    """The bytes of all chunks in blocks, of one memory: many small tensors then are few calls of the system."""
    buffer, used = memoryview(bytearray(BLOCK)), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            count = min(BLOCK - used, len(rest))
            buffer[used : used + count] = rest[:count]
            used, rest = used + count, rest[count:]
            if used == BLOCK:
                yield buffer
                used = 0
    if used:
        yield buffer[:used]


def open_file(path: Path) -> tuple[int, int]:
    """A descriptor of a regular file, and its size.

    Raises:
        CheckpointError: The file is missing, a link, or no regular file.
    """
    with typed_errors(f"open {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is no regular file, expected one; remove it")
    return fd, found.st_size


def read_at(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer with the bytes of a file from an offset on."""
    with typed_errors(f"read {path}"):
        while out:
            count = os.preadv(fd, [out], offset)
            if not count:
                raise CheckpointError(f"{path} ends at byte {offset}, while it is read; nothing may write to it")
            out, offset = out[count:], offset + count


def read_small(path: Path) -> bytes:
    """The whole content of a regular file."""
    fd, _ = open_file(path)
    with typed_errors(f"read {path}"), open(fd, "rb") as file:
        return file.read()


def sync_folder(path: Path) -> None:
    """Have the system put the names in a folder on the disk."""
    with typed_errors(f"sync {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_folders(path: Path) -> None:
    """Make a folder and those above it, durably, where they are missing."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        with typed_errors(f"make {path}"):
            path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


CODES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_CODE_OF = {dtype: code for code, dtype in CODES.items()} | {torch.complex128: "F64"}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODE_OF}
_METADATA = "__metadata__"


def write_file(path: Path | str, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors to a new file; it is on the disk when this returns.

    complex128, which the format does not have, is written as float64 with a further dim of 2. Tensors on a device are
    copied to the CPU one at a time.

    Args:
        path: The file, which must not exist.
        tensors: Dense tensors by name, of any shape and strides.

    Returns:
        The name, size and checksums of the file.

    Raises:
        TypeError: A tensor, or a name, that the format does not have. Nothing is written.
        CheckpointError: The system could not write the file.
    """
    entries = [f'"{_METADATA}":{{"format":"pt"}}']  # as other writers of torch's tensors say
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # hence all are aligned
    end = 0
    for name in names:  # one by one, so that other threads run in between
        code, shape = check_form(name, tensors[name])
        begin, end = end, end + math.prod(shape) * CODES[code].itemsize
        form = json.dumps({"dtype": code, "shape": shape, "data_offsets": (begin, end)}, separators=(",", ":"))
        entries.append(f"{json.dumps(name, ensure_ascii=False)}:{form}")
    header = ("{" + ",".join(entries) + "}").encode()
    header += b" " * (-len(header) % 8)
    return write_blocks(Path(path), _chunks(header, [*map(tensors.__getitem__, names)]))


def _chunks(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview | bytes]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def check_form(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """The code of the dtype, and the shape, in the file.

    Raises:
        TypeError: the format has no such tensor, or no such name.
    """
    if type(name) is not str or name == _METADATA:
        raise TypeError(f"a tensor is called {name!r}, expected a string other than {_METADATA!r}; rename it")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.dtype not in _CODE_OF:
        form = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"{name!r} is a tensor of {form}, expected a dense tensor of {sorted(CODES)} or complex128")
    return _CODE_OF[tensor.dtype], (*tensor.shape, *((2,) if tensor.dtype == torch.complex128 else ()))


def check_shape(shape: Any) -> tuple[int, ...]:
    """The shape, read from a file.

    Raises:
        ValueError: torch makes no tensor of it.
    """
    if any(type(dim) is not int or dim < 0 for dim in shape) or math.prod(max(dim, 1) for dim in shape) >= 2**62:
        raise ValueError(f"a shape is {shape!r}, expected dims from 0, of less than 2**62 elements")
    return tuple(shape)


class Extent(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in the file


class TensorFile:
    """A file of tensors. Each block is checked before the first values from it are returned.

    Args:
        path: The file; a link is refused.
        entry: The size and the checksums that it must have.

    Attributes:
        names: The tensors' names, in the order of the file.

    Raises:
        CheckpointError: The file is missing, has another size or another checksum, or its header is not valid.
    """

    def __init__(self, path: Path | str, entry: FileEntry) -> None:
        self.path, self._entry = Path(path), entry
        self._checked: set[int] = set()  # blocks
        self._fd, size = open_file(self.path)
        try:
            if size != entry.size or len(entry.blocks) != -(-size // BLOCK):
                expected = f"expected {entry.size} in {len(entry.blocks)} blocks"
                raise CheckpointError(f"{path} has {size} bytes, {expected}; {DAMAGED}")
            with decoding(self.path):
                self._spans = self._parse(size)
        except BaseException:
            self.close()
            raise
        self.names: list[str] = list(self._spans)

    def close(self) -> None:
        """Close the file; it can be closed twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def span(self, name: str) -> Extent:
        """Where a tensor is: of what was complex128, float64 with a further dim."""
        if name not in self._spans:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; {DAMAGED}")
        return self._spans[name]

    def read(self, name: str, memory: Tensor | None = None) -> Tensor:
        """A tensor, on the CPU.

        Args:
            memory: A tensor that is filled and returned, where it is contiguous and on the CPU, and has the shape and
                dtype of the file.

        Raises:
            CheckpointError: There is no such tensor, or its bytes are not those that were written.
        """
        dtype, shape, begin = self.span(name)
        form = ("cpu", dtype, shape)
        if memory is None or (memory.device.type, memory.dtype, memory.shape) != form or not memory.is_contiguous():
            memory = torch.empty(shape, dtype=dtype, device="cpu")
        self._read(memory.detach().view(-1).view(torch.uint8).numpy().data, begin, repr(name))
        return memory

    def verify(self) -> None:
        """Check all blocks that have not been.

        Raises:
            CheckpointError: A block's bytes are not those that were written.
        """
        memory = memoryview(bytearray(min(BLOCK, self._entry.size)))
        for index in range(len(self._entry.blocks)):
            if index not in self._checked:
                self._check(index, memory[: self._size(index)], "the file")

    def _parse(self, size: int) -> dict[str, Extent]:
        """The header's entries, in the order of the data, which they must fill without a hole."""
        first = 8 + int.from_bytes(self._bytes(0, min(8, size)), "little")
        if first > size:
            raise ValueError(f"the header ends at byte {first} of {size}")
        header = json.loads(self._bytes(8, first))
        header.pop(_METADATA, None)
        spans, begin = dict[str, Extent](), first
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            span = Extent(CODES[entry["dtype"]], check_shape(entry["shape"]), begin)
            end = begin + math.prod(span.shape) * span.dtype.itemsize
            if entry["data_offsets"] != [begin - first, end - first]:
                where = f"data_offsets of {name!r} is {entry['data_offsets']}, expected {[begin - first, end - first]}"
                raise ValueError(f"{where}: no hole, and no two tensors in one place")
            spans[name], begin = span, end
        if begin != size:
            raise ValueError(f"the last tensor ends at byte {begin}, expected {size}, the end of the file")
        return spans

    def _bytes(self, begin: int, end: int) -> bytes:
        out = bytearray(end - begin)
        self._read(memoryview(out), begin, "the header")
        return bytes(out)

    def _read(self, out: memoryview, begin: int, what: str) -> None:
        """Fill a buffer with the bytes from `begin` on. A block that it takes whole is checked in its place."""
        while out:
            index, skip = divmod(begin, BLOCK)
            count = min(len(out), BLOCK - skip)
            if index in self._checked:
                read_at(self._fd, out[:count], begin, self.path)
            elif count == self._size(index):
                self._check(index, out[:count], what)
            else:
                self._check(index, block := memoryview(bytearray(self._size(index))), what)
                out[:count] = block[skip : skip + count]
            out, begin = out[count:], begin + count

    def _size(self, index: int) -> int:
        return min(BLOCK, self._entry.size - index * BLOCK)

    def _check(self, index: int, block: memoryview, what: str) -> None:
        """Fill a buffer with a block, for `what`, and check it."""
        first = index * BLOCK
        read_at(self._fd, block, first, self.path)
        if zlib.crc32(block) != self._entry.blocks[index]:
            where = f"{self.path}: the bytes from {first} to {first + len(block)}, read for {what},"
            raise CheckpointError(f"{where} have another checksum than when they were written; {DAMAGED}")
        self._checked.add(index)
