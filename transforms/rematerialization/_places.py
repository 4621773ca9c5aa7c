"""The places of Python in which a function can leave something: entries, attributes, variables."""

from __future__ import annotations

import contextlib
import operator
import pickle
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
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
        """Note a module, a dict, list, deque or set, a variable of a closure, `Names`, a generator, or an iterator."""
        if id(held) not in self._held:
            kind = _kind_of(held)
            if kind in (_DICT, _SEQUENCE) and len(held) > _WIDEST:
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
                for n, (part, copy) in enumerate(zip(_dicts_of(held), kept, strict=True)):
                    tensors = n in (1, 2) and (copy or part)
                    if tensors or (copy or part) and not _same_dict(part, copy):
                        out._held[id(part)] = part, _DICT
                        out.copies.append(copy)
            elif not kind.same(held, kept):
                if kind is _ITERATOR:
                    kind.write(held, kept)
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


# A module's dicts in which a forward pass can leave something.
_OF_MODULE = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _dicts_of(module: nn.Module) -> list[dict[Any, Any]]:
    held = vars(module)
    return [held, *map(held.__getitem__, _OF_MODULE)]


def _read_module(module: nn.Module) -> list[dict[Any, Any]]:
    return [part.copy() if part else _EMPTY for part in _dicts_of(module)]  # most are empty


def _same_module(module: nn.Module, copy: list[dict[Any, Any]]) -> bool:
    return all([_same_dict(a, b) for a, b in zip(_dicts_of(module), copy, strict=True) if a or b])


def _write_module(module: nn.Module, copy: list[dict[Any, Any]]) -> None:
    for part, kept in zip(_dicts_of(module), copy, strict=True):
        _write_dict(part, kept)


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


def _refuse_iterator(held: Any, position: Any) -> None:
    raise TypeError(
        f"a function in remat takes values from an iterator, {held!r}, which cannot go back when it runs again; take them outside "
        f"of the function and pass them, or keep a list and an index"
    )


def _read_numpy(held: Any) -> bytes:
    return pickle.dumps(held.bit_generator.state if isinstance(held, np.random.Generator) else held.get_state())


def _write_numpy(held: Any, state: bytes) -> None:
    if isinstance(held, np.random.Generator):
        held.bit_generator.state = pickle.loads(state)
    else:
        held.set_state(pickle.loads(state))


_BUILTIN: list[Any] = [[], (), range(0), "", {}, {}.values(), {}.items(), set()]
GENERATORS: tuple[type, ...] = (random.Random, np.random.Generator, np.random.RandomState)  # of random numbers
ITERATORS: tuple[type, ...] = tuple(type(iter(one)) for one in _BUILTIN)  # those that tell their position
_DICT = _Kind(dict.copy, _same_dict, _write_dict)
_SEQUENCE = _Kind(tuple, _same_entries, _write_sequence)
_NAMES = _Kind(_read_names, lambda held, copy: _same_entries(_read_names(held), copy), _write_names)
_MODULE = _Kind(_read_module, _same_module, _write_module)
_PYTHON = _Kind(
    lambda held: held.getstate(), lambda held, copy: held.getstate() == copy, lambda held, copy: held.setstate(copy)
)
_NUMPY = _Kind(_read_numpy, lambda held, copy: _read_numpy(held) == copy, _write_numpy)
_ITERATOR = _Kind(operator.length_hint, lambda held, copy: operator.length_hint(held) == copy, _refuse_iterator)


def _kind_of(held: Any) -> _Kind:
    if isinstance(held, nn.Module):
        return _MODULE
    if isinstance(held, Names):
        return _NAMES
    if isinstance(held, GENERATORS):
        return _PYTHON if isinstance(held, random.Random) else _NUMPY
    if isinstance(held, ITERATORS):
        return _ITERATOR
    return _DICT if isinstance(held, dict) else _SEQUENCE


def variable(cell: types.CellType) -> Names:
    """The place of a variable of a closure."""
    return Names(cell, ("cell_contents",))
