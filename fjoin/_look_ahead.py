"""Loading the next batch while the current one is still to be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ._errors import JoinError

B = TypeVar("B")


def look_ahead(current: Any, load: Callable[[], B]) -> B:
    """The next batch.

    Raises:
        JoinError: the loader has written it into the memory of the current one.
    """
    held = [(tensor, tensor._version) for tensor in _tensors(current)]
    following = load()
    written = {tensor.data_ptr() for tensor, version in held if tensor._version != version}
    for tensor in _tensors(following) if written else ():
        if tensor.data_ptr() in written:
            raise JoinError(
                f"the loader has written the next batch into the memory of the current one, a tensor of shape "
                f"{tuple(tensor.shape)}, which the loop has still to use: it looks one batch ahead; copy the batch in the loader, "
                f"for example by yield batch.clone()"
            )
    return following


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch that say whether they have been written to."""
    tensors = (leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [t for t in tensors if t.layout is torch.strided and t.numel() and not t.is_inference()]
