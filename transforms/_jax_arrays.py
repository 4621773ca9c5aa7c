"""Tensors as arrays of jax and back, by DLPack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A leaf of this many elements is passed to jax alone. That takes about 60 us; joining leaves takes a copy each way.
_ALONE = 2**16


class Layout:
    """The position of each leaf in the flat arrays: one array for all small leaves of a dtype, one for each large leaf.

    Attributes:
        sizes: The arrays: (dtype, the large leaf's index or -1) -> elements.
        places: Of each leaf its array, its place in it, its number of elements, and its shape.
    """

    def __init__(self, leaves: Iterable[tuple[Any, Any]]) -> None:
        self.sizes: dict[tuple[Any, int], int] = {}
        self.places = []
        for i, (shape, dtype) in enumerate(leaves):
            numel = int(np.prod(shape))
            key = (dtype, i if numel >= _ALONE else -1)
            at = self.sizes.setdefault(key, 0)
            self.places.append((key, at, numel, tuple(shape)))
            self.sizes[key] = at + numel

    def cut(self, flats: Any) -> list[Any]:
        of = dict(zip(self.sizes, flats, strict=True))
        return [of[key][at : at + numel].reshape(shape) for key, at, numel, shape in self.places]

    def join(self, leaves: list[Any], concatenate: Callable[[list[Any]], Any]) -> tuple[Any, ...]:
        parts: dict[Any, list[Any]] = {key: [] for key in self.sizes}
        for (key, *_), leaf in zip(self.places, leaves, strict=True):
            parts[key].append(leaf.reshape(-1))
        return tuple(some[0] if len(some) == 1 else concatenate(some) for some in parts.values())


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in jax."""
    return str(dtype).removeprefix("torch.")


def to_jax(flat: Tensor) -> Any:
    """A tensor as an array of jax: a view of its memory where that is aligned to 64 bytes, else a copy."""
    jax = import_jax()
    if not flat.numel():
        return jax.numpy.zeros((0,), name_of(flat.dtype))
    return jax.dlpack.from_dlpack(flat.contiguous().resolve_conj().resolve_neg())  # whose memory holds the values


def to_torch(array: Any) -> Tensor:
    """An array of jax as a tensor: a view of its memory."""
    if not array.size:
        return torch.zeros(0, dtype=getattr(torch, str(array.dtype)))
    return torch.from_dlpack(array)  # type: ignore[attr-defined]


def import_jax() -> Any:
    """The module jax.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import jax
        import jax.dlpack
    except ImportError:
        raise ImportError("this needs jax: pip install 'fjoin[jax]'; with optax: pip install 'fjoin[optax]'") from None
    return jax
