"""The tensors of optimizer states by name, for transforms of these states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
from torch import Tensor


def state_fields(states: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Path -> name -> tensor, of the states of some parameters.

    An optimizer inside another one is looked at alone: master copies change with the parameters, and hyperparameters
    are not trained. Tensors in containers, as in the states of torch's functional optimizers, have their own names.

    >>> import torch
    >>> from fjoin import transforms as tx
    >>> state_fields(tx.sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)}))
    {'w': {'step': tensor(0.), 'momentum': tensor([0., 0.])}}
    """
    return {path: _named(state) for path, state in states.items()}


def with_state_fields(states: Mapping[str, Any], new: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """The states with other tensors in place of the result of `state_fields`."""
    return {path: _with(state, new[path]) for path, state in states.items()}


def _named(state: Any) -> dict[str, Tensor]:
    if hasattr(state, "inner"):
        return _named(state.inner)
    return dict(zip(_names(state), optree.tree_leaves(state), strict=True))


def _names(state: Any) -> list[str]:
    """A name without a dot for each tensor: its last key, and where that is taken its keys, with bars."""
    fields = getattr(type(state), "_fields", ())
    names: list[str] = []
    for accessor in optree.tree_accessors(state):
        keys = [str(getattr(entry, "field", entry.entry)).replace(".", "/") for entry in accessor]
        short = keys[-1]
        taken = len(keys) > 1 and (short in fields or short in names or short.isdigit())
        names.append("/".join(keys) if taken else short)
    return names


def _with(state: Any, new: Mapping[str, Tensor]) -> Any:
    if hasattr(state, "inner"):
        return state._replace(inner=_with(state.inner, new))
    return optree.tree_unflatten(optree.tree_structure(state), [new[name] for name in _names(state)])
