"""Other parameters in the memory of a state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..transforms.optimizers.wrappers._mixed_precision import master_of
from ._aliases import copy_if_aliased
from ._flat_params import Storage


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
