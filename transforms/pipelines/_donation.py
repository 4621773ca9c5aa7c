"""Memory that a caller gives up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import optree
import torch
from torch import Tensor

from .._errors import DonatedState
from ..tree._tree import Tree


def use(mark: Tensor, donated: bool) -> None:
    """Use a state, of which `mark` is a tensor that no other state has.

    Raises:
        DonatedState: it was donated before.
    """
    held: Any = mark
    if getattr(held, "_donated", False):
        raise DonatedState(
            "this state was donated to a step, which has overwritten it; use the state that the step returned: "
            "params, state = pipeline.step(params, grads, state, donate=True)"
        )
    if donated:
        held._donated = True


def in_own_memory(grads: Tree, params: Tree) -> Tree:
    """Gradients that may be overwritten: those that share memory with others, or with parameters, are copied."""
    if _apart([*optree.tree_leaves(params), *optree.tree_leaves(grads)]):
        return grads
    taken = _Spans(optree.tree_leaves(params))

    def own(grad: Any) -> Any:
        if not isinstance(grad, Tensor) or grad.layout is not torch.strided or taken.add(grad):
            return grad
        return grad.contiguous() if _is_spread(grad) else grad.clone(memory_format=torch.contiguous_format)

    return optree.tree_map(own, grads)


def are_apart(params: Tree) -> bool:
    """Whether no two leaves share memory, so that each can be stepped in place."""
    leaves, taken = optree.tree_leaves(params), _Spans(())
    return _apart(leaves) or all(taken.add(leaf) for leaf in leaves)


def _apart(leaves: list[Any]) -> bool:
    """Whether all are contiguous tensors and none begins before the end of another: the common case, found fast."""
    if not all(isinstance(x, Tensor) and x.layout is torch.strided and x.is_contiguous() for x in leaves):
        return False
    spans = sorted([(x.data_ptr(), x.nbytes) for x in leaves if x.nbytes])
    return all([a + size <= b for (a, size), (b, _) in itertools.pairwise(spans)])


def _is_spread(x: Tensor) -> bool:
    """Whether elements of a tensor share memory, or there are gaps between them."""
    return not bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


class _Spans:
    """Parts of memory that are taken."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._by_storage: dict[int, list[tuple[int, int]]] = {}
        for x in tensors:
            if isinstance(x, Tensor) and x.layout is torch.strided:
                self.add(x)

    def add(self, x: Tensor) -> bool:
        """Take the memory of a tensor; False if some of it is taken, or it is not in one piece."""
        if _is_spread(x):
            return False
        start = x.data_ptr()
        span = start, start + x.nbytes
        others = self._by_storage.setdefault(x.untyped_storage().data_ptr(), [])
        if x.nbytes and any(low < span[1] and span[0] < high for low, high in others):
            return False
        others.append(span)
        return True
