"""A setting of the C library's allocator."""

from __future__ import annotations

import functools

import torch


@functools.cache
def keep_freed() -> None:
    """Make glibc keep the memory that threads free, instead of returning it and faulting it in again in each step.

    glibc sets its mmap and trim thresholds by the largest mapped block, of up to 32 MiB, that was ever freed; so this
    allocates and frees one (benchmarks/alone.py shows the difference). The effect lasts for the whole process. Where
    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ is set, or the C library is not glibc, it has no effect.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
