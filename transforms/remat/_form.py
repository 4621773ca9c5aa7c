"""The form of a call, on which plans depend."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor, nn

from ._abstract import batches
from .surroundings._reach import captured, is_tracked

_MOST = 64  # plans that are remembered of a function
T = TypeVar("T")
_PLANS: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def remembered(fn: Callable[..., Any], how: Hashable, args: Any, kwargs: Any, make: Callable[[], T]) -> T:
    """A plan for a call, made for the first call of this form; it lives as long as the function."""
    owner, part = _owner(fn)
    try:
        plans = _PLANS.setdefault(owner, {})
    except TypeError:  # no weak references to it
        return make()
    key = part, how, form_of(fn, args, kwargs)
    if key not in plans:
        plan = make()
        if len(plans) >= _MOST:
            plans.pop(next(iter(plans)))
        plans[key] = plan
    return plans[key]  # type: ignore[no-any-return]


def _owner(fn: Any) -> tuple[Any, Hashable]:
    """What a function lives as long as: of a method, its object."""
    if isinstance(fn, types.MethodType):
        return fn.__self__, fn.__func__
    if (
        isinstance(fn, functools.partial)
        and len(fn.args) == 1
        and not fn.keywords
        and isinstance(fn.args[0], nn.Module)
    ):
        return fn.args[0], fn.func
    return fn, None


def form_of(fn: Any, args: Any, kwargs: Any) -> Hashable:
    """The form of the arguments and of all tensors that the function can reach, other arguments, autocast, and the modes of modules."""
    given: Any = (args, kwargs)
    leaves, form = optree.tree_flatten(given, none_is_leaf=True)
    found = captured(fn, args, kwargs)
    of = tuple(_form(x) if isinstance(x, Tensor) else _value(x) for x in leaves)
    reached = tuple(map(_form, (*found.tracked.values(), *found.state.values())))
    kinds = {x.device.type for x in leaves if isinstance(x, Tensor)}
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds))
    modes = tuple(module.training for module in found.modules)
    return form, of, reached, casts, modes, batches()


def _form(x: Tensor) -> Hashable:
    return tuple(x.shape), x.dtype, x.device, is_tracked(x)


def _value(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return type(x)
    return type(x), x
