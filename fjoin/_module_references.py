"""The parts of a module that other objects refer to."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SIMPLE = frozenset((type(None), str, bytes, int, float, complex, bool))


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


def filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


def slots_of(x: Any) -> tuple[str, ...]:
    """The names of an object's attributes in slots."""
    named: list[str] = []
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            named.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


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


# Objects are entered one deep, which ends at handlers and configurations: a trainer's own parts are not searched.
_OBJECTS = 1


class _View(NamedTuple):
    """A tensor that is a view of a parameter or buffer."""

    path: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    detached: bool

    def of(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1).as_strided(self.size, self.stride, self.offset)
        return flat.detach() if self.detached else flat


class References:
    """Finds what refers to a module's tensors and submodules, and makes it anew of other ones.

    Args:
        parts: The module and its submodules.
        paths: The paths of its tensors, by identity.
        index: The indices of `parts`, by identity.

    Raises:
        ValueError: an attribute is a view of a tensor and cannot be made of another one.
    """

    def __init__(self, parts: list[nn.Module], paths: Mapping[int, str], index: Mapping[int, int]) -> None:
        self.paths, self.index = paths, index
        self.views = _find_views(parts, paths)

    def within(self, value: Any, objects: int = _OBJECTS) -> bool:
        """Whether a value is or contains one of the module's tensors or submodules."""
        return self._within(value, objects, {})

    def _within(self, value: Any, objects: int, seen: dict[int, int]) -> bool:
        if value.__class__ in SIMPLE:
            return False
        value = _referent(value)
        if isinstance(value, (Tensor, nn.Module)):
            return id(value) in self.paths or id(value) in self.views or id(value) in self.index
        if seen.get(id(value), -1) >= objects:
            return False
        seen[id(value)] = objects
        inside, objects = contents(value, objects)
        return any(self._within(one, objects, seen) for one in inside)


class Rebuilding:
    """Makes values anew, for one call: with other modules and tensors in the place of a module's own.

    An object that several attributes hold is copied once.

    Args:
        references: To the module's own.
        modules: In the order of its parts.
        tensors: Path -> tensor.

    Attributes:
        copied: For each object of a user's class that has been copied: its attributes, those of the copy, those with which the
            copy began, and the copy itself, to which there may be weak references only.
    """

    def __init__(self, references: References, modules: list[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        self._references, self._modules, self._tensors = references, modules, tensors
        self._done: dict[int, Any] = {}
        self.copied: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]] = []

    def of(self, value: Any, objects: int = _OBJECTS) -> Any:
        """A value with the others in it, or the value itself if it refers to none of the module's own."""
        behind, references = _referent(value), self._references
        if behind is not value:
            new = self.of(behind, objects)
            return value if new is behind else _weak(value, new)
        if isinstance(value, nn.Module):
            at = references.index.get(id(value))
            return value if at is None else self._modules[at]
        if isinstance(value, Tensor):
            if (path := references.paths.get(id(value))) is not None:
                return self._tensors[path]
            view = references.views.get(id(value))
            return value if view is None else view.of(self._tensors[view.path])
        if id(value) in self._done or not references.within(value, objects):
            return self._done.get(id(value), value)
        left = contents(value, objects)[1]
        made = with_contents(value, lambda inside: self.of(inside, left), self._done)
        if left < objects:
            self.copied.append((vars(value), vars(made), dict(vars(made)), made))
        return made


def _find_views(parts: list[nn.Module], paths: Mapping[int, str]) -> dict[int, _View]:
    """Tensors in attributes that are views of the module's tensors, by identity."""
    starts: dict[int, Tensor] = {}
    for part in parts:
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and _has_memory(tensor):
                starts.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    found: dict[int, _View] = {}
    for part in parts:
        for name, value in part.__dict__.items():
            if not isinstance(value, Tensor) or id(value) in paths or not _has_memory(value):
                continue
            base = starts.get(value.untyped_storage().data_ptr())
            if base is None:
                continue
            path, offset = paths[id(base)], int(value.storage_offset() - base.storage_offset())
            last = offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            if not base.is_contiguous() or base.dtype is not value.dtype or offset < 0 or last >= base.numel():
                raise ValueError(
                    f"{type(part).__name__}.{name} is a view of {path!r} that cannot be made of other values; compute it in the "
                    f"module's forward pass"
                )
            found[id(value)] = _View(path, value.shape, value.stride(), offset, not value.requires_grad)
    return found


def _has_memory(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)
    return plain and tensor.numel() > 0


def _referent(value: Any) -> Any:
    """What a weak reference refers to; any other value itself."""
    if isinstance(value, weakref.ref):
        return value()
    if type(value) in weakref.ProxyTypes:
        with contextlib.suppress(ReferenceError):
            return value.__dir__.__self__
    return value


def _weak(like: Any, value: Any) -> Any:
    """A weak reference of the same kind to another value."""
    if isinstance(like, weakref.WeakMethod):
        return weakref.WeakMethod(value)
    return weakref.ref(value) if isinstance(like, weakref.ref) else weakref.proxy(value)
