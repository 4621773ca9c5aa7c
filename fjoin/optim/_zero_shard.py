"""The pieces of a ZeroRedundancyOptimizer, and the optimizer in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets import gather_leaves
from ..groups import GroupAxis
from ..transforms.base import Spec, trees
from ..transforms.layout import Pieces, cut
from ..transforms.optimizers import OF_TORCH, Optimizer as StepParamOptimizer, as_functional_optim
from ._param_groups import own_by_group, whose

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
        probe = torch.zeros(1, 1, requires_grad=True)
        defaults = optimizer_class([probe], **arguments).defaults  # type: ignore[arg-type]
        known = optimizer_class in OF_TORCH
        return as_functional_optim(optimizer_class, **arguments) if known else WholeLeaves(), defaults
    makes = callable(optimizer_class) and not isinstance(optimizer_class, type)
    made = optimizer_class(**arguments) if makes else optimizer_class
    if not isinstance(made, StepParamOptimizer):
        raise TypeError(
            f"optimizer_class must be a class of torch.optim, or a function such as tx.lion, got {optimizer_class!r}"
        )
    if made.select is not None:
        raise TypeError(
            f"{made!r} differs by path; pass parameter groups with their own hyperparameters, or register tx.zero(...) with "
            f"the module"
        )
    return made, own_by_group(made)


class Shard(NamedTuple):
    """The pieces of one parameter group."""

    pieces: Pieces
    params: dict[str, Tensor]  # path -> parameter; the path is its number in the group
    slices: dict[str, Tensor]  # path -> this rank's slice: a view of the parameter where that is contiguous
    flats: list[Tensor | None]  # by bucket: the parameters' memory, where they are views of it


@torch.no_grad()
def give(shards: Sequence[Shard]) -> None:
    """Give this rank's slices the values and gradients of the parameters.

    Raises:
        TypeError: a sparse gradient.
    """
    for shard in shards:
        for path, p in shard.params.items():
            own, (start, stop), grad = shard.slices[path], shard.pieces.slices[path], p.grad
            if grad is not None and grad.layout is not torch.strided:
                trees.check_dense(f"the gradient of {whose(p)}", grad)
            if own.numel():
                if not p.is_contiguous():
                    own.copy_(p.reshape(-1)[start:stop].view(own.shape))
                own.grad = None if grad is None else grad.reshape(-1)[start:stop].view(own.shape)


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
        trees.check_dense(f"parameter {path} of a group", p)
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
