"""The form of a call, on which plans depend."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ._abstract import batches
from ._captured import captured, is_tracked

_MOST = 64  # plans that a function remembers
T = TypeVar("T")


def remembered(plans: dict[Hashable, T], form: Hashable, make: Callable[[], T]) -> T:
    """The plan for a form, made when it is asked for first."""
    if form not in plans:
        found = make()
        if len(plans) >= _MOST:
            plans.pop(next(iter(plans)))
        plans[form] = found
    return plans[form]


def form_of(fn: Any, args: Any, kwargs: Any) -> Hashable:
    """The shapes, dtypes and devices of the arguments, their other values, autocast, and the modes of modules."""
    given: Any = (args, kwargs)
    leaves, form = optree.tree_flatten(given, none_is_leaf=True)
    of = [
        (tuple(x.shape), x.dtype, x.device, is_tracked(x))
        if isinstance(x, Tensor)
        else x
        if isinstance(x, Hashable)
        else type(x)
        for x in leaves
    ]
    kinds = {x.device.type for x in leaves if isinstance(x, Tensor)}
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds))
    modes = tuple(module.training for module in captured(fn).modules)
    return form, tuple(of), casts, modes, batches()
