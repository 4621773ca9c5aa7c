"""Checksums of batches, by which a resumed loop knows whether it loads the batch that comes next."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from ..records import checksum, form

_LEAVES = 2048  # of a batch, that are looked at
_DEPTH = 4  # of objects within objects
_BYTES = 2**30  # of a tensor or an array; a larger one may be a whole file


def fingerprint(batch: Any, devices: bool = False) -> int | None:
    """A checksum of the content of a batch of any type, the same in another process; None if it cannot be computed.

    Args:
        devices: Whether to read tensors on devices, for which the host waits; otherwise their dtypes and shapes count.
    """
    try:
        return checksum(itertools.islice(_content(batch, devices, _DEPTH), _LEAVES))
    except Exception:  # of a type that does as it likes; neither a save nor a loop may fail for it
        return None


def _content(batch: Any, devices: bool, depth: int) -> Iterator[Any]:
    """Tensors, numbers and texts. An object without state that can be seen is the name of its type."""
    for one in optree.tree_leaves(batch, none_is_leaf=True):
        if isinstance(one, Tensor) and one.layout is torch.strided and not one.is_meta and not one.is_nested:
            yield form(one)
            if one.nbytes <= _BYTES and (devices or one.device.type == "cpu"):
                yield one.detach()
        elif isinstance(one, bool | int | float | complex | str | bytes | None):
            yield one
        elif depth and getattr(getattr(one, "dtype", None), "hasobject", False):  # its bytes are addresses
            yield from _content(one.tolist(), devices, depth - 1)
        elif callable(getattr(one, "tobytes", None)) and getattr(one, "nbytes", 0) <= _BYTES:  # an array, an image
            yield zlib.crc32(one.tobytes())
        elif depth and hasattr(one, "__dict__") and not (callable(one) or isinstance(one, Tensor)):
            yield from _content(vars(one), devices, depth - 1)
        else:
            yield type(one).__name__
