"""The places of Python in which a function can leave something: entries, attributes, variables."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import nn

_WIDEST = 100_000  # entries of a container that are looked at
_MISSING = object()


class Names(NamedTuple):
    """Some variables of a file, attributes of a class, or attributes in slots."""

    owner: Any
    names: tuple[str, ...]


class _Kind(NamedTuple):
    """How to copy the entries of a container, to compare them by identity, and to set them."""

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]


class Places:
    """Containers that a function can reach; what it leaves in them can be taken back, identities included."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, _Kind]] = {}

    def add(self, held: Any) -> None:
        """Note a module, a dict, list, deque or set, a variable of a closure, or `Names`."""
        if id(held) not in self._held:
            kind = _kind_of(held)
            if kind is not _NAMES and kind is not _MODULE and len(held) > _WIDEST:
                return
            self._held[id(held)] = held, kind

    def read(self) -> list[Any]:
        """Copies of all containers."""
        return [kind.read(held) for held, kind in self._held.values()]

    def write(self, copies: Sequence[Any]) -> None:
        """Give all containers the entries of these copies."""
        for (held, kind), kept in zip(self._held.values(), copies, strict=True):
            if not kind.same(held, kept):
                kind.write(held, kept)

    def changes(self, before: Sequence[Any]) -> Changed:
        """The containers that differ from these copies, and modules, whose tensors others may change between two runs."""
        out = Changed()
        for (i, one), kept in zip(self._held.items(), before, strict=True):
            held, kind = one
            if kind is _MODULE:
                tensors = held._parameters, held._buffers
                for part, copy in zip(tensors, kept[1:], strict=True):
                    if copy or part:
                        out._held[id(part)] = part, _DICT
                        out.copies.append(copy)
                if not _same_dict(vars(held), kept[0]):
                    out._held[i] = vars(held), _DICT
                    out.copies.append(kept[0])
            elif not kind.same(held, kept):
                out._held[i] = one
                out.copies.append(kept)
        return out

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context after which all entries are what they were before it."""
        before = self.read()
        try:
            yield
        finally:
            self.write(before)


class Changed(Places):
    """Containers, and copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []

    def undo(self) -> None:
        """Give them the entries of the copies again."""
        self.write(self.copies)


def _same_dict(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a.values(), b.values())) and all(map(is_, a, b))


_EMPTY: dict[Any, Any] = {}


def _write_dict(held: dict[Any, Any], copy: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict  # methods of a user's class may do more
    kind.clear(held)
    for key, value in copy.items():
        kind.__setitem__(held, key, value)


def _read_module(module: nn.Module) -> tuple[dict[str, Any], ...]:
    held = vars(module)  # most have no parameters or no buffers of their own
    parameters, buffers = held["_parameters"], held["_buffers"]
    return held.copy(), parameters.copy() if parameters else _EMPTY, buffers.copy() if buffers else _EMPTY


def _same_module(module: nn.Module, copy: tuple[dict[str, Any], ...]) -> bool:
    held = vars(module)
    parts = held, held["_parameters"], held["_buffers"]
    return all(_same_dict(a, b) for a, b in zip(parts, copy, strict=True) if a or b)


def _write_module(module: nn.Module, copy: tuple[dict[str, Any], ...]) -> None:
    _write_dict(vars(module), copy[0])
    _write_dict(module._parameters, copy[1])
    _write_dict(module._buffers, copy[2])


def _write_sequence(held: Any, copy: tuple[Any, ...]) -> None:
    if isinstance(held, list):
        list.__setitem__(held, slice(None), copy)
    else:
        kind: Any = set if isinstance(held, set) else deque
        kind.clear(held)
        (set.update if kind is set else deque.extend)(held, copy)


def _read_names(held: Names) -> tuple[Any, ...]:
    owner, names = held
    if isinstance(owner, (dict, type)):
        of = owner if isinstance(owner, dict) else vars(owner)
        return tuple(of.get(name, _MISSING) for name in names)
    found = []
    for name in names:
        try:
            found.append(getattr(owner, name))
        except (AttributeError, ValueError):  # ValueError: a variable of a closure that is not assigned
            found.append(_MISSING)
    return tuple(found)


def _write_names(held: Names, copy: tuple[Any, ...]) -> None:
    owner, names = held
    for name, value, now in zip(names, copy, _read_names(held), strict=True):
        if value is now:
            continue
        if isinstance(owner, dict):
            owner[name] = value
            if value is _MISSING:
                del owner[name]
            continue
        kind = type if isinstance(owner, type) else object
        if value is _MISSING:
            kind.__delattr__(owner, name)
        else:
            kind.__setattr__(owner, name, value)


def _same_entries(a: Any, b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


_DICT = _Kind(dict.copy, _same_dict, _write_dict)
_SEQUENCE = _Kind(tuple, _same_entries, _write_sequence)
_NAMES = _Kind(_read_names, lambda held, copy: _same_entries(_read_names(held), copy), _write_names)
_MODULE = _Kind(_read_module, _same_module, _write_module)


def _kind_of(held: Any) -> _Kind:
    if isinstance(held, nn.Module):
        return _MODULE
    if isinstance(held, Names):
        return _NAMES
    return _DICT if isinstance(held, dict) else _SEQUENCE


def variable(cell: types.CellType) -> Names:
    """The place of a variable of a closure."""
    return Names(cell, ("cell_contents",))
