"""Memory that the ranks of one host share: regions without a name, which the system frees with their last process."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import weakref

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_SPARE = 4  # steps send messages of several sizes, one after the other


class Region:
    """A piece of shared memory, as this process sees it.

    Attributes:
        bytes: The memory, (size,) uint8.
        fd: The file descriptor by which another process can map it; open while the memory is in use here.
    """

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.number, self.fd, self.size = number, fd, size
        self._map = mmap.mmap(fd, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()


class HostMemory:
    """The regions that this process has made."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._made: dict[int, tuple[int, int]] = {}  # address of a region in use -> number, descriptor
        self._free: list[Region] = []  # for values on their way; the last one was given back last
        self._lent = self._most = 0  # bytes now, and at most
        self._closed = False
        self.dropped: list[int] = []  # the numbers of regions that other processes may unmap

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, (numel,), in a region of its own, which lives as long as the tensor and its views.

        Raises:
            OSError: there is not enough memory.
        """
        region = self._make(max(numel, 1) * dtype.itemsize)
        return region.bytes.view(dtype)[:numel]

    def _make(self, size: int) -> Region:
        size = math.ceil(size / _PAGE) * _PAGE
        fd = os.memfd_create("fjoin", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)  # an error here, and not a SIGBUS at the first access
            region = Region(next(self._numbers), fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._made[region.address] = region.number, fd
        weakref.finalize(region._map, self._drop, region.address).atexit = False
        return region

    def _drop(self, address: int) -> None:
        number, fd = self._made.pop(address)
        with contextlib.suppress(OSError):
            os.close(fd)
        self.dropped.append(number)

    def find(self, x: Tensor) -> tuple[int, int, int] | None:
        """The region that a tensor lies in: its number, its descriptor, and the tensor's first byte in it."""
        storage = x.untyped_storage().data_ptr()
        found = self._made.get(storage)
        return None if found is None else (*found, x.data_ptr() - storage)

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of arbitrary values, (numel,), whose region is used again once it and its views are gone."""
        region = self.borrow(numel * dtype.itemsize)
        lease = memoryview(region._map)
        weakref.finalize(lease, self.give_back, region).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)[: numel * dtype.itemsize].view(dtype)

    def borrow(self, nbytes: int) -> Region:
        """A region of at least `nbytes`, and at most an eighth more, to be given back."""
        nbytes = max(nbytes, 1)
        step = max(_PAGE, 1 << (nbytes - 1).bit_length() >> 4)
        size = math.ceil(nbytes / step) * step
        place = next((i for i in reversed(range(len(self._free))) if self._free[i].size == size), None)
        region = self._make(size) if place is None else self._free.pop(place)
        self._lent += size
        self._most = max(self._most, self._lent)
        return region

    def give_back(self, region: Region) -> None:
        """Keep a region for later; in all a few times the bytes that were ever lent at once."""
        self._lent -= region.size
        if not self._closed:
            self._free.append(region)
            while sum(one.size for one in self._free) > _SPARE * self._most:
                self._free.pop(0)

    def close(self) -> None:
        self._closed = True
        self._free.clear()
