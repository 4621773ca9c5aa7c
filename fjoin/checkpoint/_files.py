"""Files that are durable, in blocks with checksums; errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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

    Checksums find what happens by chance; what is decoded with a right one and is odd all the same was forged, or written by
    another program. So it is enough that an error names the file, and that nothing is read beyond it.
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
