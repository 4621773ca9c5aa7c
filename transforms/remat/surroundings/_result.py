"""The result of a function: a pytree of tensors, other values, and objects that hold tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from ._reach import slots_of

# Values in which no tensors are looked for.
_PLAIN = (str, bytes, int, float, complex, type, types.FunctionType, types.ModuleType, nn.Module, torch.Generator)


class Form(NamedTuple):
    """A result without its tensors.

    tree: Its structure.
    leaves: The place of each tensor; an `Object`; or another value.
    """

    tree: Any
    leaves: list[Any]


class Place(NamedTuple):
    """The place of a tensor: its kind and number."""

    kind: str
    number: int


class Object(NamedTuple):
    """An object that holds tensors in its attributes."""

    value: Any
    attributes: dict[str, Form]


def form_of(result: Any, place: Callable[[Tensor], Any]) -> Form:
    """The form of a result.

    Args:
        result: A pytree, whose leaves may be any values.
        place: Called with each tensor; returns what stands in its place.

    Raises:
        TypeError: an iterator, of which the function has not run yet what it will give.
    """
    return _form(result, place, set())


def rebuilt(form: Form, tensor: Callable[[Any], Any]) -> Any:
    """The result of this form. Objects are those that the function has returned.

    Args:
        form: The form.
        tensor: Called with what stands in the place of a tensor.
    """
    leaves: list[Any] = []
    for leaf in form.leaves:
        if isinstance(leaf, Object):
            for name, inner in leaf.attributes.items():
                object.__setattr__(leaf.value, name, rebuilt(inner, tensor))
            leaves.append(leaf.value)
        else:
            leaves.append(tensor(leaf) if isinstance(leaf, Place) else leaf)
    return optree.tree_unflatten(form.tree, leaves)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in a result, those in attributes of objects included."""
    found: list[Tensor] = []
    form_of(result, found.append)
    return found


def _form(x: Any, place: Callable[[Tensor], Any], seen: set[int]) -> Form:
    leaves, tree = optree.tree_flatten(x)
    return Form(tree, [place(leaf) if isinstance(leaf, Tensor) else _other(leaf, place, seen) for leaf in leaves])


def _other(x: Any, place: Callable[[Tensor], Any], seen: set[int]) -> Any:
    if isinstance(x, (Iterator, Coroutine)):
        raise TypeError(
            f"a function in remat has returned a {type(x).__name__}, which has not computed yet what it will give; return a list"
        )
    if isinstance(x, _PLAIN) or id(x) in seen:
        return x
    seen.add(id(x))
    held = getattr(x, "__dict__", None)
    values = dict(held) if isinstance(held, dict) else {}
    values |= {name: getattr(x, name) for name in slots_of(x) if hasattr(x, name)}
    forms = {name: form for name, value in values.items() if _holds(form := _form(value, place, seen))}
    return Object(x, forms) if forms else x


def _holds(form: Form) -> bool:
    return any(isinstance(leaf, (Place, Object, Tensor)) for leaf in form.leaves)
