"""References to a module's tensors and submodules in its plain attributes: in lists, functions, and as views."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
        self._paths, self._index = paths, index
        self._views = _find_views(parts, paths)

    def within(self, value: Any) -> bool:
        """Whether a value is or contains one of the module's tensors or submodules."""
        return self._within(value, set())

    def _within(self, value: Any, seen: set[int]) -> bool:
        if isinstance(value, (Tensor, nn.Module)):
            return id(value) in self._paths or id(value) in self._views or id(value) in self._index
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._within(inside, seen) for inside in _inside(value))

    def rebuilt(self, value: Any, modules: list[nn.Module], tensors: Mapping[str, Tensor]) -> Any:
        """A value with other modules and tensors in the place of the module's own.

        Args:
            modules: In the order of `parts`.
            tensors: Path -> tensor.
        """
        done: dict[int, Any] = {}

        def again(value: Any) -> Any:
            if isinstance(value, nn.Module):
                at = self._index.get(id(value))
                return value if at is None else modules[at]
            if isinstance(value, Tensor):
                if (path := self._paths.get(id(value))) is not None:
                    return tensors[path]
                view = self._views.get(id(value))
                return value if view is None else view.of(tensors[view.path])
            if id(value) in done or not self.within(value):
                return done.get(id(value), value)
            return _with_inside(value, again, done)

        return again(value)


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


def _inside(value: Any) -> Iterable[Any]:
    """The values inside a container or a function."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
    return ()


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _with_inside(value: Any, again: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """A container or a function like this one, with other values inside."""
    made: Any
    if isinstance(value, dict):
        made = done[id(value)] = value.copy()
        made.update({key: again(inside) for key, inside in value.items()})
    elif isinstance(value, list):
        made = done[id(value)] = value.copy()
        made[:] = [again(inside) for inside in value]
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
    else:
        cells = tuple(
            types.CellType(again(cell.cell_contents)) if _filled(cell) else cell for cell in value.__closure__ or ()
        )
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
    done[id(value)] = made
    return made
