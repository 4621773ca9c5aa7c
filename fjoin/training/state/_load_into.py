"""The values of a run back in a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...transforms.tree._tree import named_leaves
from ._state import TrainState

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def load_into(module: M, params: Any, buffers: Mapping[str, Tensor] | None = None) -> M:
    """Copy parameters and buffers into a module, to evaluate, export or save it as any other module.

    Parameters that the module shares, as tied weights are, are found under any of their names. What is not given keeps its values.

    Args:
        module: A module of the form of the one that `functional` took.
        params: A `TrainState`, whose buffers are taken too; or path -> tensor, such as `tx.ema_params(state.params, state.pipeline)`.
        buffers: Path -> tensor, with `params` of the second kind.

    Returns:
        The module.

    Raises:
        ValueError: a path that the module does not have, another shape, or two values for one tensor. Nothing is changed.
        TypeError: `module` is no module; a value is no tensor; buffers beside a `TrainState`.

    >>> model = torch.nn.Linear(2, 1)
    >>> apply, params, _ = fjoin.functional(model)
    >>> fjoin.load_into(model, {path: torch.zeros_like(p) for path, p in params.items()})(torch.ones(2)).item()
    0.0
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"load_into takes a module and its values, got a {type(module).__name__} as the module")
    if isinstance(params, TrainState):
        if buffers is not None:
            raise TypeError("load_into: a TrainState has its own buffers; pass its params to give others")
        params, buffers = params.params, params.buffers
    given = {**named_leaves(params), **(buffers or {})}
    places = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    if unknown := sorted(given.keys() - places.keys()):
        raise ValueError(f"load_into: the module has no parameter or buffer {unknown}; it has {list(places)}")
    chosen: dict[int, str] = {}
    for path, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"load_into: {path!r} is a {type(value).__name__}, expected a tensor")
        place, first = places[path], chosen.setdefault(id(places[path]), path)
        if place.shape != value.shape:
            raise ValueError(
                f"load_into: {path!r} has the shape {tuple(value.shape)}, but in the module {tuple(place.shape)}"
            )
        if first != path and not torch.equal(given[first], value):
            raise ValueError(f"load_into: the module shares {first!r} and {path!r}, but their values differ; give one")
    for path in chosen.values():
        places[path].copy_(given[path])
    return module
