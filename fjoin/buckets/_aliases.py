"""Values that share memory with flat buffers, and values written into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..transforms.optimizers import master_of
from ._storage import Storage


def copy_if_aliased(state: Any, lent: Iterable[Tensor]) -> Any:
    """The state, with copies of its tensors that share memory with tensors in `lent`; the copies are detached."""
    own = _apart_from(lent)
    with torch.no_grad():
        if all(own(leaf) is leaf for leaf in optree.tree_leaves(state)):
            return state
        return optree.tree_map(own, state)


def assign_(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values to their places, correct even where values and places share memory.

    Raises:
        TypeError: there is no tensor for a place.
        ValueError: a value has another shape than its place.
    """
    to, new, own = [], [], _apart_from(places.values())
    for path, place in places.items():
        value = values.get(path) if isinstance(values, Mapping) else values
        if not isinstance(value, Tensor):
            got = "nothing" if value is None else f"a value of type {type(value).__name__}"
            raise TypeError(f"for {path!r} the hook returned {got}, expected a tensor of shape {tuple(place.shape)}")
        if value.shape != place.shape:
            raise ValueError(
                f"for {path!r} the hook returned a tensor of shape {tuple(value.shape)}, expected {tuple(place.shape)}"
            )
        if not (
            value.data_ptr() == place.data_ptr() and value.stride() == place.stride() and value.dtype is place.dtype
        ):
            to.append(place)
            new.append(own(value))
    if to:
        torch._foreach_copy_(to, new)


def _apart_from(lent: Iterable[Tensor]) -> Callable[[Any], Any]:
    """A function that clones a tensor that shares memory with one of these, and returns any other value unchanged."""
    # The same for all views of one tensor, and 0 for what holds no elements.
    starts = {x.untyped_storage().data_ptr() for x in lent} - {0}

    def own(x: Any) -> Any:
        if type(x) is not Tensor and (not isinstance(x, Tensor) or is_traceable_wrapper_subclass(x)):
            return x
        return x.clone() if x.layout is torch.strided and x.untyped_storage().data_ptr() in starts else x

    return own


@torch.no_grad()
def load_params(storage: Storage, params: Mapping[str, Tensor]) -> None:
    """Copy parameters by path into the buffers, and into exact values and master copies. They may be views of the buffers."""
    params = copy_if_aliased(dict(params), storage.flats)
    for path, leaf in storage.leaves.items():
        leaf.detach().copy_(params[path])
    for k, own in enumerate(storage.exact):
        own.copy_(storage.own(k, storage.flats[k]))
    if storage.has_masters:
        states = storage.optimizer_states()
        for path, own in storage.own_leaves().items():
            if (master := master_of(states[path])) is not None:
                master.copy_(own)
