"""A guard against loaders that reuse memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from .._errors import JoinError

B = TypeVar("B")
_LOOKED_AT = 1024  # the number of leading elements compared; a new batch changes some of them


class LookAhead:
    """Loads the next batch in a loop, and detects a loader that writes it into the memory of the current one.

    Tensor operations that write increment the version of a tensor. Writes by other code, such as numpy, do not: once
    the loader has reused such external memory for a tensor, a copy of its values is kept, and a write is detected one
    batch later.
    """

    def __init__(self) -> None:
        self._again: set[int] = set()  # start addresses of external memory that the loader has used twice
        self._current: tuple[Any, list[Tensor]] = (None, [])  # the last batch that was loaded, and its tensors

    def __call__(self, current: Any, load: Callable[[], B]) -> B:
        """The next batch.

        Raises:
            JoinError: the loader has written it into the memory of the current one.
        """
        known, tensors = self._current
        if known is not current:
            tensors = _tensors(current)
        held = {tensor.data_ptr(): (tensor, tensor._version) for tensor in tensors}
        copies = {start: _bytes(tensor) for start, (tensor, _) in held.items() if start in self._again}
        following = load()
        self._current = following, _tensors(following)
        for tensor in self._current[1]:
            start = tensor.data_ptr()
            if start not in held:
                continue
            before, version = held[start]
            if before._version != version or (start in copies and not torch.equal(copies[start], _bytes(before))):
                text = "the loader has written the next batch into the memory of the current one, a tensor of shape"
                remedy = (
                    "the loop looks one batch ahead; copy the batch in the loader, for example by yield batch.clone()"
                )
                raise JoinError(f"{text} {tuple(tensor.shape)}, which is still to be used: {remedy}")
            if not tensor.untyped_storage().resizable():
                self._again.add(start)
        return following


def _bytes(tensor: Tensor) -> Tensor:
    """The beginning of a tensor as bytes, which compare equal even where the elements are NaN."""
    start = tensor.detach().reshape(-1)[:_LOOKED_AT] if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    return start.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch that have a version."""
    tensors = (leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [t for t in tensors if t.layout is torch.strided and t.numel() and not t.is_inference()]
