"""The pieces of a ZeroRedundancyOptimizer, the optimizer in it, and how it loads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from ..buckets import gather_leaves
from ..groups import GroupAxis
from ..transforms.base import Spec, check_dense, to_state_dict
from ..transforms.layout import Pieces, cut
from ..transforms.optimizers import OF_TORCH, Optimizer as StepParamOptimizer, as_functional_optim
from ._optimizer import Optimizer
from ._param_groups import Hyperparameters, loaded, own_by_group, whose, without_params

# Classes whose states have a momentum of another name, and those whose states count no steps.
_WITH_BUFFER = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Muon)
_WITHOUT_STEP = (torch.optim.SGD, torch.optim.Muon)


def torchs_state(optimizer_class: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state of ours by torch's names."""
    if optimizer_class not in _WITH_BUFFER:
        return state
    left_out = "step" if optimizer_class in _WITHOUT_STEP else None
    names = {"momentum": "momentum_buffer"}
    return {names.get(name, name): value for name, value in state.items() if name != left_out}


def our_state(optimizer_class: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state of torch by our names."""
    if optimizer_class not in _WITH_BUFFER or not state:
        return state
    step = {"step": torch.ones(())} if optimizer_class in _WITHOUT_STEP else {}
    names = {"momentum_buffer": "momentum"}
    return {**step, **{names.get(name, name): value for name, value in state.items() if value is not None}}


class WholeLeaves:
    """Stands for an optimizer of which only its class is known: it needs whole parameters."""

    select, spec, check = None, Spec(""), None
    elementwise = False
    cost = staticmethod(torch.Size.numel)

    def at(self, path: str) -> WholeLeaves:
        return self


def optimizer_of(optimizer_class: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The optimizer of ours for a class of torch, or for one of our factories, and its hyperparameters by name.

    A class that is not known gives a `WholeLeaves`.

    Raises:
        TypeError: it makes no optimizer; arguments that it does not take.
        ValueError: values that it refuses.
    """
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer):
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise TypeError(
                f"{optimizer_class.__name__} searches along a direction of all parameters, so no rank can step its own share of them; "
                f"use it without ZeroRedundancyOptimizer"
            )
        probe = torch.zeros(1, 1, requires_grad=True)
        defaults = optimizer_class([probe], **arguments).defaults  # type: ignore[arg-type]
        known = optimizer_class in OF_TORCH
        return as_functional_optim(optimizer_class, **arguments) if known else WholeLeaves(), defaults
    makes = callable(optimizer_class) and not isinstance(optimizer_class, type)
    made = optimizer_class(**arguments) if makes else optimizer_class
    if not isinstance(made, StepParamOptimizer):
        raise TypeError(
            f"optimizer_class must be a class of torch.optim, or a function such as tx.lion that makes an optimizer, got "
            f"{optimizer_class!r}"
        )
    if made.select is not None:
        raise TypeError(
            f"{made!r} differs by path; pass parameter groups with their own hyperparameters, or register tx.zero(...) with "
            f"the module"
        )
    return made, own_by_group(made)


Gradients = dict[str, Tensor | None]  # path -> gradient


class Shard(NamedTuple):
    """The pieces of one parameter group."""

    pieces: Pieces
    params: dict[str, Tensor]  # path -> parameter; the path is its number in the group
    slices: dict[str, Tensor]  # path -> this rank's slice: a view of the parameter where that is contiguous
    flats: list[Tensor | None]  # by bucket: the parameters' memory, where they are views of it


class OwnSlice(NamedTuple):
    """This rank's slice of a flat parameter."""

    shape: torch.Size  # of the parameter
    start: int
    stop: int  # 0 where the rank owns nothing of it
    whole: bool  # whether the optimizer needs the whole parameter, which one rank then owns


def own_slices(shards: Sequence[Shard]) -> dict[int, OwnSlice]:
    """By the number of the parameter in all groups."""
    every = ((shard.pieces, path) for shard in shards for path in shard.params)
    return {
        number: OwnSlice(pieces.shapes[path], *pieces.slices[path], path in pieces.whole)
        for number, (pieces, path) in enumerate(every)
    }


def own_gradients(shards: Sequence[Shard]) -> list[Gradients]:
    """The gradients that the parameters have on this rank, by group."""
    return [{path: p.grad for path, p in shard.params.items()} for shard in shards]


@torch.no_grad()
def give(shards: Sequence[Shard], grads: Sequence[Gradients]) -> None:
    """Give this rank's slices their values and gradients."""
    for shard, of in zip(shards, grads, strict=True):
        for path, own in shard.slices.items():
            (start, stop), p, grad = shard.pieces.slices[path], shard.params[path], of[path]
            if own.numel():
                if not p.is_contiguous():
                    own.copy_(p.reshape(-1)[start:stop].view(own.shape))
                # A gradient that is this rank's slice already came from another rank.
                if grad is not None and grad.shape == p.shape:
                    grad = grad.reshape(-1)[start:stop].view(own.shape)
                own.grad = grad


def gather(shards: Sequence[Shard], axis: GroupAxis) -> None:
    """Write all ranks' slices into the parameters."""
    for shard in shards:
        for own in shard.slices.values():
            own.grad = None
        gather_leaves(shard.pieces, shard.slices, shard.params, axis, shard.flats)


@torch.no_grad()
def cut_group(group: Sequence[Tensor], part: Any, ranks: int, rank: int, as_views: bool) -> Shard:
    """The pieces of a group of parameters.

    Args:
        part: The optimizer.
        as_views: Whether to make the parameters of a bucket views of one tensor.
    """
    params = {str(i): p for i, p in enumerate(group)}
    for path, p in params.items():
        check_dense(f"parameter {path} of a group", p)
    pieces = cut(params, part, "data", ranks, rank)
    flats: list[Tensor | None] = []
    for k, bucket in enumerate(pieces.buckets):
        flat = None
        # A module relies on the strides of its parameters.
        if as_views and all(params[path].is_contiguous() for path in bucket.paths):
            flat = pieces.pack(k, {path: p.detach() for path, p in params.items()}).clone()
            for path, view in pieces.leaves(k, flat).items():
                params[path].data = view
        flats.append(flat)
    own = pieces.own({path: p.detach() for path, p in params.items()})
    slices = {path: piece.detach().requires_grad_(params[path].requires_grad) for path, piece in own.items()}
    return Shard(pieces, params, slices, flats)


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
