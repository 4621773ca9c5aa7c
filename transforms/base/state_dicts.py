"""A state as a flat dict of tensors and numbers, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from .trees import State


def to_state_dict(state: State) -> dict[str, Any]:
    """A state by name, for torch.save and torch.load(weights_only=True), which do not know fjoin's NamedTuples.

    Args:
        state: The state of a transform, an optimizer or a pipeline, or any pytree of tensors and numbers.

    Returns:
        Name -> tensor or number. The name is the path of fields, keys and indices, joined by dots. The tensors are the
        state's own.

    Raises:
        ValueError: two leaves have the same name, as those of {"a": {"b": ...}, "a.b": ...} would.
        TypeError: a leaf is neither tensor nor number, nor text.

    Same as: flax.serialization.to_state_dict, but flat.

    >>> from fjoin import transforms as tx
    >>> opt = tx.sgd(0.1, momentum=0.9)
    >>> to_state_dict(opt.init({"w": torch.zeros(2)}))
    {'w.step': tensor(0.), 'w.momentum': tensor([0., 0.])}
    """
    names, leaves, _ = _named(state)
    return dict(zip(names, leaves, strict=True))


def from_state_dict(like: State, state_dict: Mapping[str, Any]) -> State:
    """The state from which `to_state_dict` made a dict.

    Args:
        like: A state of the same form, from `init`. Its values do not matter; its dtypes and devices are kept.
        state_dict: The result of `to_state_dict`.

    Returns:
        A new state in new memory. Leaves that are one tensor in `like`, such as the optimizer's step count of all
        parameters, are one tensor again where their values are equal.

    Raises:
        ValueError: other names or shapes, which the message lists.
        TypeError: a tensor in place of a number, or the other way round; a dtype to which the saved one cannot be cast,
            such as whole numbers from floats; `state_dict` is no mapping.

    Same as: flax.serialization.from_state_dict.

    >>> from fjoin import transforms as tx
    >>> opt, params = tx.sgd(0.1), {"w": torch.zeros(2)}
    >>> _, state = opt.step(params, params, opt.init(params))
    >>> from_state_dict(opt.init(params), to_state_dict(state))["w"].step
    tensor(1.)
    """
    return restored("the state", like, state_dict)


def restored(what: str, like: State, saved: Mapping[str, Any], in_place: bool = False) -> State:
    """`from_state_dict`, for a state whose name in errors is `what`.

    Args:
        in_place: Whether the memory of `like` may be taken, where no two leaves share it; a failure then leaves some of
            it changed. `saved` then has a method `into(name, memory)`, which may fill the memory and return it.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"{what} must be a mapping from names to tensors and numbers, got {saved!r}")
    names, positions, structure = _named(like)
    if saved.keys() != set(names):
        lacks, more = set(names) - saved.keys(), sorted(map(str, saved.keys() - set(names)))
        raise ValueError(f"{what} lacks {sorted(lacks)}, and has {more} that are not here")
    shared: dict[Any, Tensor] = {}
    taken_places = set[int]()
    leaves: list[Any] = []
    for name, place in zip(names, positions, strict=True):
        if isinstance(place, Tensor):
            own = in_place and place.dim() > 0 and place.is_contiguous() and id(place) not in taken_places
            given = saved.into(name, place) if own else saved[name]  # type: ignore[attr-defined]
            if not isinstance(given, Tensor):
                raise TypeError(f"{what}: {name!r} is {given!r}, expected a tensor")
            if given.layout is not torch.strided or given.is_meta > place.is_meta:
                form = f"a tensor of layout {given.layout} on {given.device}"
                raise TypeError(f"{what}: {name!r} is {form}, expected a dense one that holds values")
            if place.shape != given.shape:
                raise ValueError(f"{what}: {name!r} has shape {tuple(given.shape)}, but here {tuple(place.shape)}")
            if not torch.can_cast(given.dtype, place.dtype):
                raise TypeError(f"{what}: {name!r} is {given.dtype}, which cannot become {place.dtype}")
            if own:
                taken_places.add(id(place))
            value = place if own else torch.empty_like(place)
            if given is not value:
                value.copy_(given.detach())
            leaves.append(value if place.dim() else shared.setdefault((id(place), given.item()), value))
        elif type(saved[name]) is not type(place):
            raise TypeError(f"{what}: {name!r} is {saved[name]!r}, expected a {type(place).__name__} like {place!r}")
        else:
            leaves.append(saved[name])
    return optree.tree_unflatten(structure, leaves)


def _named(state: State) -> tuple[list[str], list[Any], Any]:
    """Names, leaves and the structure."""
    accessors, leaves, structure = optree.tree_flatten_with_accessor(state)
    names = [".".join(map(_entry, accessor)) for accessor in accessors]
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, (Tensor, int, float, str)):
            where = f"the state has at {name!r}" if name else "the state is"
            such = "such as the state of a transform, or state.pipeline of a train_step"
            text = f"{where} a {type(leaf).__name__}, which cannot be saved"
            raise TypeError(f"{text}; expected a pytree of tensors and numbers, {such}")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"several leaves of the state are called {twice}; rename a parameter")
    return names, leaves, structure


def names_of(state: State) -> list[tuple[str, bool]]:
    """Of each leaf, in optree's order: its name in `to_state_dict`, and whether a later call reads it."""
    names, _, _ = _named(state)
    accessors, nodes, _ = optree.tree_flatten_with_accessor(state, is_leaf=lambda node: hasattr(node, "unread"))
    unread = tuple(
        ".".join([*map(_entry, accessor), field])
        for accessor, node in zip(accessors, nodes, strict=True)
        for field in getattr(node, "unread", ())
    )
    inside = tuple(f"{field}." for field in unread)
    return [(name, name not in unread and not name.startswith(inside)) for name in names]


def _entry(entry: Any) -> str:
    return str(getattr(entry, "field", entry.entry))
