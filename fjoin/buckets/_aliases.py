"""Values written into flat buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..transforms.base import trees
from ..transforms.optimizers import master_of
from ._storage import Storage


def assign_(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values to their places, correct even where values and places share memory.

    Raises:
        TypeError: there is no tensor for a place.
        ValueError: a value has another shape than its place.
    """
    to, new, own = [], [], trees.apart_from(places.values())
    for path, place in places.items():
        value = values.get(path) if isinstance(values, Mapping) else values
        if not isinstance(value, Tensor):
            got = "nothing" if value is None else f"a value of type {type(value).__name__}"
            raise TypeError(f"for {path!r} the hook returned {got}, expected a tensor of shape {tuple(place.shape)}")
        if value.shape != place.shape:
            raise ValueError(
                f"for {path!r} the hook returned shape {tuple(value.shape)}, expected {tuple(place.shape)}"
            )
        if not (
            value.data_ptr() == place.data_ptr() and value.stride() == place.stride() and value.dtype is place.dtype
        ):
            to.append(place)
            new.append(own(value))
    if to:
        torch._foreach_copy_(to, new)


@torch.no_grad()
def load_params(storage: Storage, params: Mapping[str, Tensor]) -> None:
    """Copy parameters by path into the buffers, and into exact values and master copies.

    They may be views of the buffers.
    """
    params = trees.copy_if_aliased(dict(params), storage.flats)
    for path, leaf in storage.leaves.items():
        leaf.detach().copy_(params[path])
    for k, own in enumerate(storage.exact):
        own.copy_(storage.own(k, storage.flats[k]))
    if storage.has_masters:
        states = storage.optimizer_states()
        for path, own in storage.own_leaves().items():
            if (master := master_of(states[path])) is not None:
                master.copy_(own)
