"""The tensors of optimizer states by name, for transforms of these states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def state_fields(states: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Path -> name -> tensor, of the states of some parameters.

    An optimizer inside another one is looked at alone: master copies change with the parameters, and hyperparameters
    are not trained.

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
    return {name: value for name, value in zip(state._fields, state, strict=True) if value is not None}


def _with(state: Any, new: Mapping[str, Tensor]) -> Any:
    return state._replace(inner=_with(state.inner, new)) if hasattr(state, "inner") else state._replace(**new)
