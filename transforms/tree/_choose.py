"""The state after a step, or the state before it, where only a device knows which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._tree import State, to_device, transformed

# From the chosen tensors to a state.
Build: TypeAlias = Callable[[list[Any]], Any]


def choose_state(fine: Tensor, new: Any, old: Any) -> State:
    """`new` where `fine`, `old` otherwise; host counters are always those of `new`, since they count calls.

    A tensor that is in a state several times is chosen once, and so are all small tensors of one shape: each choice is a
    launch. NaN in one state does not reach the other.

    Args:
        fine: A 0-d bool tensor.
        new, old: The states, or functions that return them. Of a state from a function each tensor is freed once it has
            been chosen or left, so that at no time three states are in memory.

    A state with a method `choose(fine, old)` is replaced by the result of that method.
    """
    pairs: list[Any] = []
    build = _plan(fine, _made(new), _made(old), pairs, {})
    chosen: list[Any] = [None] * len(pairs)
    for some in _groups(pairs):
        found = _choose(fine, [pairs[i] for i in some])
        for i, tensor in zip(some, found, strict=True):
            chosen[i], pairs[i] = tensor, None
    return build(chosen)


def _made(state: Any) -> State:
    while callable(state):
        state = state()
    return state


def _plan(fine: Tensor, new: Any, old: Any, pairs: list[Any], places: dict[Any, int]) -> Build:
    """A function that makes the state from the chosen tensors, which are listed in `pairs`; it refers to none of them.

    Args:
        places: The place of each pair, by identity.
    """
    if not isinstance(new, (tuple, dict)) and new is old:  # the compiler compares no containers by identity
        return lambda chosen: new
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        place = len(pairs)
        if not transformed():  # the compiler knows no identities
            place = places.setdefault((id(new), id(old)), place)
        if place == len(pairs):
            pairs.append((new, old))
        return lambda chosen: chosen[place]
    if type(new) is type(old) and hasattr(new, "choose"):
        own = new.choose(fine, old)
        return lambda chosen: own
    if isinstance(new, dict) and isinstance(old, dict):  # the first call may add names, such as a lane's
        named = {key: _plan(fine, part, old.get(key), pairs, places) for key, part in new.items()}
        return lambda chosen: {key: part(chosen) for key, part in named.items()}
    if isinstance(new, (tuple, list)) and type(new) is type(old) and len(new) == len(old):
        kind, parts = type(new), [_plan(fine, n, o, pairs, places) for n, o in zip(new, old, strict=True)]
        if hasattr(new, "_fields"):
            return lambda chosen: kind(*(part(chosen) for part in parts))
        return lambda chosen: kind(part(chosen) for part in parts)
    return lambda chosen: new


def _groups(pairs: list[Any]) -> list[list[int]]:
    """The places of pairs that are chosen together."""
    if transformed():
        return [[i] for i in range(len(pairs))]
    groups: dict[Any, list[int]] = {}
    for i, (new, old) in enumerate(pairs):
        alike = new.shape == old.shape and new.dtype is old.dtype and new.device == old.device
        small = alike and new.numel() <= _SMALL and type(new) is type(old) is Tensor
        groups.setdefault((new.shape, new.dtype, new.device) if small else i, []).append(i)
    return list(groups.values())


_SMALL = 16  # elements; copies of as few cost nothing


def _choose(fine: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The chosen tensors of pairs of one shape, in one choice."""
    new, old = pairs[0] if len(pairs) == 1 else (torch.stack(given) for given in zip(*pairs, strict=True))
    all_of = (new, old) if pairs[0][0].dim() else (new, old, fine)
    # On the host it would have to wait for the device.
    device = next((x.device for x in all_of if x.device.type != "cpu"), new.device)
    chosen = torch.where(to_device(device, fine), to_device(device, new), to_device(device, old))
    return [chosen] if len(pairs) == 1 else list(chosen.unbind(0))
