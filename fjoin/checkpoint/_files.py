"""Files that are durable and whose every block has a checksum; JSON that is checked."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import reprlib
import stat
import zlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .._errors import CheckpointError

LARGEST = 2**62
_DEEPEST = 64


class Refused(ValueError):
    """A value is not as expected. The readers of files make a CheckpointError of it, writers a TypeError."""


def refuse(where: str, value: Any, expected: str) -> NoReturn:
    raise Refused(f"{where} is {reprlib.repr(value)}, expected {expected}")


def parse(data: bytes, where: str) -> Any:
    """The value of strict JSON: no key twice, no NaN, limited nesting."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_pairs, parse_constant=_constant)
    except RecursionError:
        raise Refused(f"{where} is nested too deeply, expected at most {_DEEPEST} levels") from None
    except ValueError as error:
        raise Refused(f"{where} is not valid JSON: {error}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def whole(value: Any, where: str, low: int = 0, high: int = LARGEST) -> int:
    """An integer in [low, high]; a bool is none."""
    if type(value) is not int or not low <= value <= high:
        refuse(where, value, f"an integer from {low} to {high}")
    return value


def text(value: Any, where: str) -> str:
    if type(value) is not str:
        refuse(where, value, "a string")
    return value


def array(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        refuse(where, value, "a list")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    """An object of JSON with any keys."""
    if type(value) is not dict:
        refuse(where, value, "an object")
    for key in value:
        if type(key) is not str:
            refuse(f"a key of {where}", key, "a string")
    return value


def record(value: Any, where: str, keys: Set[str]) -> dict[str, Any]:
    """An object of JSON with exactly these keys."""
    if type(value) is not dict or value.keys() != keys:
        refuse(f"the set of keys of {where}", sorted(mapping(value, where)), f"{sorted(keys)}")
    return value


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Any value that JSON keeps as it is: finite numbers, strings, None, and lists and objects of such."""
    if depth > _DEEPEST:
        raise Refused(f"{where} is nested too deeply, expected at most {_DEEPEST} levels")
    if type(value) is list:
        for index, item in enumerate(value):
            if type(item) is not int:  # the quick case: states of generators are long lists of integers
                plain(item, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in mapping(value, where).items():
            plain(item, f"{where}[{key!r}]", depth + 1)
    elif type(value) is float:
        if not math.isfinite(value):
            refuse(where, value, "a finite number")
    elif value is not None and type(value) not in (bool, int, str):
        refuse(where, value, "a value of JSON: a number, string, bool, None, list, or dict")
    return value


BLOCK = 4 << 20  # bytes under one checksum
_DAMAGED = "the file is damaged or not of this checkpoint: use another step"
_ADVICE = {
    errno.ENOSPC: "free some space there, or choose another file system",
    errno.EDQUOT: "free some of the quota there, or choose another file system",
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
    errno.EROFS: "choose a file system that can be written",
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


class BlockWriter:
    """A new file, written block by block. It is durable after `finish`."""

    def __init__(self, path: Path) -> None:
        self._path, self._size, self._blocks = path, 0, list[int]()
        self._buffer, self._used = memoryview(bytearray(BLOCK)), 0
        with typed_errors(f"make {path}"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes; a memoryview must be of bytes."""
        data = memoryview(data)
        while data:
            count = min(BLOCK - self._used, len(data))
            self._buffer[self._used : self._used + count] = data[:count]
            self._used += count
            data = data[count:]
            if self._used == BLOCK:
                self._write_block()

    def _write_block(self) -> None:
        block = self._buffer[: self._used]
        self._blocks.append(zlib.crc32(block))
        self._size += len(block)
        self._used = 0
        with typed_errors(f"write {self._path}"):
            while block:
                block = block[os.write(self._fd, block) :]

    def finish(self) -> FileEntry:
        """Write what is left, and have the system put the file on the disk."""
        if self._used:
            self._write_block()
        with typed_errors(f"write {self._path}"):
            os.fsync(self._fd)
        return FileEntry(self._path.name, self._size, self._blocks)


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


class BlockReader:
    """A file, read block by block. Each block is checked when it is read first.

    Raises:
        CheckpointError: The file is missing, a link, or has another size than `entry`.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.path, self._entry = path, entry
        self._checked: set[int] = set()
        self._cached: tuple[int, memoryview] | None = None  # the block that was read last
        self._fd, size = open_file(path)
        if size != entry.size or len(entry.blocks) != -(-size // BLOCK):
            self.close()
            raise CheckpointError(
                f"{path} has {size} bytes, expected {entry.size} in {len(entry.blocks)} blocks; {_DAMAGED}"
            )

    def close(self) -> None:
        """Close the file; it can be closed twice."""
        self.release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        """Free the memory of the block that was read last."""
        self._cached = None

    def read(self, out: memoryview, begin: int, what: str) -> None:
        """Fill a buffer with the bytes from `begin` on.

        Args:
            what: Whose bytes they are, for errors.
        """
        while out:
            index, skip = divmod(begin, BLOCK)
            count, size = min(len(out), BLOCK - skip), self._size(index)
            if self._cached is not None and self._cached[0] == index:
                out[:count] = self._cached[1][skip : skip + count]
            elif index in self._checked:
                read_at(self._fd, out[:count], begin, self.path)
            elif count == size:
                self._check(index, out[:count], what)
            else:
                self._check(index, block := memoryview(bytearray(size)), what)
                self._cached = index, block
                out[:count] = block[skip : skip + count]
            out, begin = out[count:], begin + count

    def verify(self) -> None:
        """Check all blocks that have not been."""
        block = memoryview(bytearray(min(BLOCK, self._entry.size)))
        for index in range(len(self._entry.blocks)):
            if index not in self._checked:
                self._check(index, block[: self._size(index)], "the file")

    def _size(self, index: int) -> int:
        return min(BLOCK, self._entry.size - index * BLOCK)

    def _check(self, index: int, out: memoryview, what: str) -> None:
        """Fill a buffer with a block."""
        first = index * BLOCK
        read_at(self._fd, out, first, self.path)
        if zlib.crc32(out) != self._entry.blocks[index]:
            where = f"{self.path}: the bytes from {first} to {first + len(out)}, read for {what},"
            raise CheckpointError(f"{where} have another checksum than when they were written; {_DAMAGED}")
        self._checked.add(index)


def read_small(path: Path, limit: int) -> bytes:
    """The whole content of a file of at most `limit` bytes."""
    fd, size = open_file(path)
    try:
        if size > limit:
            raise CheckpointError(
                f"{path} has {size} bytes, expected at most {limit}; it is not a file of a checkpoint"
            )
        content = bytearray(size)
        read_at(fd, memoryview(content), 0, path)
    finally:
        os.close(fd)
    return bytes(content)


def write_small(path: Path, content: bytes) -> None:
    """Write a new file, durably."""
    with BlockWriter(path) as out:
        out.write(content)
        out.finish()


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
