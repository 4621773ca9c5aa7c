"""What is inside a container, a function or an object of a user's class, and the same with other values inside."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from .transforms.remat.surroundings._reach import filled, slots_of


def contents(value: Any, objects: int) -> tuple[Iterable[Any], int]:
    """The values inside a container, a function, or an object of a user's class.

    Args:
        objects: How many more objects may be entered, one inside another.

    Returns:
        The values, and the number of objects that is left.
    """
    inside: Iterable[Any] = ()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        inside = value
    elif isinstance(value, (dict, types.MappingProxyType)):
        inside = (*value, *value.values())
    elif isinstance(value, types.MethodType):
        inside = (value.__self__,)
    elif isinstance(value, functools.partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if filled(cell)]
        inside = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
    elif isinstance(value, functools._lru_cache_wrapper):
        inside = (value.__wrapped__,)
    elif objects and _is_plain(value):
        return vars(value).values(), objects - 1
    return inside, objects


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of a user's class, with attributes."""
    kind = type(value)
    users = kind.__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])
    try:  # not by the object's own __getattr__
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return False
    return users and type(held) is dict and _blank(value) is not None


def _blank(value: Any) -> Any:
    """An object of the same class without attributes; None where the class is none that Python code defines."""
    with contextlib.suppress(TypeError):
        return (types.SimpleNamespace if isinstance(value, types.SimpleNamespace) else object).__new__(type(value))
    return None


def copy_slots(of: Any, to: Any) -> None:
    """Give an object the attributes in slots that another one of its class has."""
    for name in slots_of(of):
        if hasattr(of, name):
            object.__setattr__(to, name, getattr(of, name))


def with_contents(value: Any, again: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """A container or a function like this one, with other values inside."""
    made: Any
    if isinstance(value, dict):
        made = done[id(value)] = value.copy()
        new = [(again(key), again(inside)) for key, inside in value.items()]
        made.clear()
        made.update(new)
    elif isinstance(value, types.MappingProxyType):
        made = types.MappingProxyType({again(key): again(inside) for key, inside in value.items()})
    elif isinstance(value, (list, deque)):
        made = done[id(value)] = value.copy()
        new = [again(inside) for inside in value]
        made.clear()
        made.extend(new)
    elif isinstance(value, tuple):
        items = [again(inside) for inside in value]
        made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, (set, frozenset)):
        made = type(value)(again(inside) for inside in value)
    elif isinstance(value, types.MethodType):
        made = types.MethodType(value.__func__, again(value.__self__))
    elif isinstance(value, functools.partial):
        words = {key: again(inside) for key, inside in value.keywords.items()}
        made = functools.partial(again(value.func), *map(again, value.args), **words)
    elif isinstance(value, functools._lru_cache_wrapper):
        made = functools.lru_cache(**value.cache_parameters())(again(value.__wrapped__))
    elif not isinstance(value, types.FunctionType):
        made = done[id(value)] = _blank(value)
        vars(made).update({name: again(inside) for name, inside in vars(value).items()})
        copy_slots(value, made)
    else:
        cells = tuple(
            types.CellType(again(cell.cell_contents)) if filled(cell) else cell for cell in value.__closure__ or ()
        )
        defaults = None if value.__defaults__ is None else tuple(map(again, value.__defaults__))
        made = done[id(value)] = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        made.__kwdefaults__ = {name: again(inside) for name, inside in (value.__kwdefaults__ or {}).items()} or None
        made.__dict__.update({name: again(inside) for name, inside in value.__dict__.items()})
    done[id(value)] = made
    return made
