"""The memory of tensors, and tensors as places in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Part(NamedTuple):
    """A tensor in the result of an operation."""

    memory: StorageWeakRef
    device: torch.device
    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]


def memory_of(x: Tensor) -> int:
    """A number that tensors share which share memory."""
    try:
        with torch._C.DisableTorchFunction():  # out of sight of modes for functions
            return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of a transform
        return -id(x)


def part_of(x: Any) -> Any:
    """A tensor as a `Part`; other values as they are."""
    if not isinstance(x, Tensor):
        return x
    return Part(StorageWeakRef(x.untyped_storage()), x.device, x.dtype, x.storage_offset(), x.size(), x.stride())


def tensor_of(part: Part) -> Tensor:
    """A tensor again, whose memory is still there."""
    storage = torch.UntypedStorage._new_with_weak_ptr(part.memory.cdata)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, part.offset, part.size, part.stride)
