"""Memory that the ranks of one host share: ranges of a file without a name, which the system frees with its last
process.

A process has one such file for all of its tensors, so it needs one descriptor, however many tensors there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_SPARE = 4  # steps send messages of several sizes, one after the other


class HostRegion:
    """A range of a file of shared memory, as this process sees it.

    Attributes:
        first: The first byte in the file; no other region of the file ever begins there.
        bytes: The memory, (size,) uint8.
    """

    def __init__(self, fd: int, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.map = _map(fd, first, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()


class HostMemory:
    """The shared memory that this process has made.

    Finalizers may run at any moment, also within a method of this object, so they only append to queues.

    Attributes:
        fd: The file's descriptor, by which another process can map its regions.

    Raises:
        OSError: there is not enough memory, or a limit forbids it.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("fjoin", os.MFD_CLOEXEC)
        self._end = 0  # of the file; ranges are not used again, since freed ones take no memory
        self._lock = threading.Lock()
        self._made: dict[int, int] = {}  # address of a region in use -> its first byte in the file
        self._free: list[HostRegion] = []  # for values on their way; the last one was given back last
        self._returned: deque[HostRegion] = deque()
        self._lent = self._most = 0  # bytes now, and at most
        self._closed, self._process = False, os.getpid()
        self.dropped: deque[int] = deque()  # the first bytes of regions that other processes may unmap
        weakref.finalize(self, _close, self.fd).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, (numel,), in a region of its own, which lives as long as the tensor and its views."""
        if self._closed:
            return torch.zeros(numel, dtype=dtype)
        region = self._make(max(numel, 1) * dtype.itemsize)
        return region.bytes.view(dtype)[:numel]

    def _make(self, size: int) -> HostRegion:
        size = math.ceil(size / _PAGE) * _PAGE
        with self._lock:
            first = self._end
            os.posix_fallocate(self.fd, first, size)  # an error here, and not a SIGBUS at the first access
            region = HostRegion(self.fd, first, size)
            self._end += size
            self._made[region.address] = first
        weakref.finalize(region.map, self._drop, region.address, size).atexit = False
        return region

    def _drop(self, address: int, size: int) -> None:
        """Free a region, whose tensors are gone. After `close`, and in a forked process, others may still read it."""
        first = self._made.pop(address)
        if not self._closed and self._process == os.getpid():
            _libc.madvise(address, size, mmap.MADV_REMOVE)
            self.dropped.append(first)
        _libc.munmap(address, size)

    def find(self, x: Tensor) -> tuple[int, int, int] | None:
        """The region that a tensor lies in: its first byte in the file, its size, and the tensor's first byte in it."""
        storage = x.untyped_storage()
        first = self._made.get(storage.data_ptr())
        return None if first is None else (first, len(storage), x.data_ptr() - storage.data_ptr())

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary values, (numel,), whose region is used again once it and its views are gone."""
        if self._closed:
            return torch.empty(numel, dtype=dtype)
        region = self.borrow(numel * dtype.itemsize)
        lease = memoryview(region.map)
        weakref.finalize(lease, self.give_back, region).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)[: numel * dtype.itemsize].view(dtype)

    def borrow(self, nbytes: int) -> HostRegion:
        """A region of at least `nbytes`, and at most an eighth more, to be given back."""
        nbytes = max(nbytes, 1)
        step = max(_PAGE, 1 << (nbytes - 1).bit_length() >> 4)
        size = math.ceil(nbytes / step) * step
        with self._lock:
            self._take_back()
            place = next((i for i in reversed(range(len(self._free))) if self._free[i].size == size), None)
            region = None if place is None else self._free.pop(place)
        region = region or self._make(size)
        with self._lock:
            self._lent += size
            self._most = max(self._most, self._lent)
        return region

    def give_back(self, region: HostRegion) -> None:
        """Keep a region for later. A finalizer may call it."""
        if not self._closed:
            self._returned.append(region)

    def _take_back(self) -> None:
        """Keep what has been given back: in all a few times the bytes that were ever lent at once."""
        while self._returned:
            region = self._returned.popleft()
            self._lent -= region.size
            self._free.append(region)
        spare = sum(one.size for one in self._free) - _SPARE * self._most
        while spare > 0:
            spare -= self._free.pop(0).size

    def close(self) -> None:
        """Make no more regions. Those in use stay."""
        self._closed = True
        self._free.clear()
        self._returned.clear()


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _map(fd: int, first: int, size: int) -> Any:
    """A buffer over a range of a file. Unlike Python's mmap it keeps no descriptor."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, first)
    if address in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size} bytes of shared memory: {os.strerror(error)}")
    return (ctypes.c_ubyte * size).from_address(address)


def map_of_peer(fd: int, first: int, size: int) -> HostRegion:
    """A region of another process, unmapped once its tensors are gone."""
    region = HostRegion(fd, first, size)
    weakref.finalize(region.map, _libc.munmap, region.address, size).atexit = False
    return region


_libc = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
