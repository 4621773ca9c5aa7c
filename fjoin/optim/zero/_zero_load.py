"""The whole state that a ZeroRedundancyOptimizer is given, and each rank's part of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor

from ...transforms.tree._state_dict import to_state_dict
from .._foreach import loaded, whose
from .._optimizer import Optimizer
from .._param_groups import Hyperparameters, without_params
from ._optimizer_class import WholeLeaves, our_state
from ._zero_shard import Shard

# A parameter, the optimizer with the hyperparameters of the state, and the state of the whole parameter by our names.
WholeState = tuple[Tensor, Any, dict[str, Any]]


def whole_states(
    hyper: Hyperparameters, optimizer_class: Any, groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[WholeState]]:
    """The groups with the loaded hyperparameters, and the states of all parameters in order; {} for none.

    Args:
        hyper: Those of the optimizer, or of `WholeLeaves`.
        groups: The present groups.
        state_dict: In torch's form.

    Raises:
        ValueError, TypeError: other groups, or states of another optimizer or shape; alike on ranks that own no part of it.
    """
    given, saved = state_dict["param_groups"], state_dict["state"]
    sizes, own = ([len(group["params"]) for group in some] for some in (given, groups))
    if sizes != own:
        raise ValueError(f"the state has groups of {sizes} parameters, but the optimizer of {own}")
    for group in given:
        hyper.check(group)
    merged, found = [], []
    for mine, theirs in zip(groups, given, strict=True):
        values = {**mine, **theirs, "params": mine["params"]}
        merged.append(values)
        for p, key in zip(mine["params"], theirs["params"], strict=True):
            state = our_state(optimizer_class, saved.get(key, {}))
            part = hyper.of_saved(values, "", p, state) if state else hyper.optimizer
            if state and not isinstance(part, WholeLeaves):
                loaded(whose(p), part, torch.empty_like(p, device="meta"), state)  # or raise
            found.append((p, part, state))
    return merged, found


def load_slices(
    local: torch.optim.Optimizer,
    shards: Iterable[Shard],
    groups: Iterable[dict[str, Any]],
    states: Iterable[WholeState],
) -> None:
    """Load the states of whole parameters, in order, into the optimizer of this rank's slices."""
    packed: list[dict[str, Any]] = []
    given: dict[int, Any] = {}
    rest, numbers = iter(states), itertools.count()
    for shard, group in zip(shards, groups, strict=True):
        packed.append({**without_params(group), "params": []})
        for path, own in shard.slices.items():
            p, part, state = next(rest)
            if own.numel():
                packed[-1]["params"].append(number := next(numbers))
                if state:
                    given[number] = slice_state(part, state, p, own, *shard.pieces.slices[path])
    if isinstance(local, Optimizer):
        local.load_state_dict({"state": given, "param_groups": packed})
    else:  # not by a method of its own, since this is no state that it has saved; torch's does so too
        torch.optim.Optimizer.load_state_dict(local, {"state": given, "param_groups": packed})


def slice_state(part: Any, state: dict[str, Any], p: Tensor, own: Tensor, start: int, stop: int) -> dict[str, Any]:
    """The part of a parameter's state that belongs to a slice of it.

    Args:
        state: The state of the whole parameter, by name.
        own: The slice, from `start` to `stop` in the flat parameter `p`, or empty where another rank owns `p` as a whole.
    """
    if isinstance(part, WholeLeaves):
        return on_device(state, p.device)
    found: dict[str, Any] = {}
    for name, like in to_state_dict(part.init_param(own.detach())).items():
        value = state[name]
        if like.dim() and part.elementwise:
            value = value.reshape(-1)[start:stop].view(own.shape)
        elif like.dim() and not own.numel() and p.numel():  # another rank owns the parameter
            value = like
        elif like.dim() and not p.dim():  # the slice of a number is a vector
            value = value.reshape(like.shape)
        found[name] = value
    return on_device(found, p.device)


def on_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a state, of any nesting, with its tensors on a device; 0-d tensors stay where they are."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(device if value.dim() else value.device, copy=True)

    tree: Any = state
    return cast("dict[str, Any]", optree.tree_map(copied, tree, none_is_leaf=True))
