"""The whole state of a ZeroRedundancyOptimizer: gathered from the ranks' slices, and cut into them.

It travels as tensors and JSON, so that no rank unpickles what another one sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import optree
import torch
from torch import Tensor

from ..groups import Communicator, GroupAxis, plain
from ..records import put_together, taken_apart
from ..shared_memory import flat_view
from ..transforms.base import state_dicts
from ._optimizer import Optimizer
from ._param_groups import Hyperparameters, loaded, whose, without_params
from ._zero_shard import Shard, WholeLeaves, our_state


class NoState(dict[Any, Any]):
    """The state of parameters that no rank has as a whole."""

    def __missing__(self, key: Any) -> NoReturn:
        raise RuntimeError(
            "a ZeroRedundancyOptimizer has no whole state of a parameter, only slices of it on each rank; call "
            "consolidate_state_dict(to=...) on all ranks, then state_dict() on that rank"
        )


class Owned(NamedTuple):
    """One rank's part of the state of a parameter."""

    number: int  # of the parameter
    start: int  # its slice of the flat parameter
    stop: int
    state: dict[str, Any]  # name -> value; tensors are of the slice, of the whole leaf, or 0-d
    sliced: bool  # whether tensors of the slice are flat


def gather_states(
    mesh: Communicator, to: int, owned: Iterable[Owned], shapes: Sequence[torch.Size], device: torch.device
) -> dict[int, dict[str, Any]] | None:
    """The states of all parameters by their number, on rank `to`; None on the other ranks.

    Args:
        owned: This rank's parts.
        shapes: The shapes of the parameters.

    Raises:
        TypeError: on all ranks: some rank has a state that does not consist of tensors, numbers, strings, None, and
            lists, tuples and dicts of these.
    """
    axis: GroupAxis = mesh.axes["data"]
    tensors, raw, mine = dict[str, Tensor](), dict[str, Tensor](), list[Any]()
    try:
        mine = [(*one[:3], taken_apart(one.state, f"{one.number}.{one.start}", tensors), one.sliced) for one in owned]
        raw = {name: plain(tensor.to(device)) for name, tensor in tensors.items()}
        bad = ""
    except Exception as error:  # the other ranks wait for this one's part
        bad = str(error)
    forms = [(name, str(one.dtype).removeprefix("torch."), list(one.shape), one.nbytes) for name, one in raw.items()]
    every = mesh.exchange("consolidate_state_dict", [mine, forms, bool(bad)], list)
    if refusing := [rank for rank, (*_, refuses) in enumerate(every) if refuses]:
        raise TypeError(
            "consolidate_state_dict: the state of an optimizer must consist of tensors, numbers and strings, in lists, tuples and "
            f"dicts; it does not on ranks {refusing}{f', here {bad}' if bad else ''}"
        )
    sizes = [sum(nbytes for *_, nbytes in of) for _, of, _ in every]
    take = [size if axis.rank == to else 0 for size in sizes]
    give = [sizes[axis.rank] if rank == to else 0 for rank in range(axis.size)]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    sent = torch.cat([nothing, *(flat_view(one).view(torch.uint8) for one in raw.values())])
    received = axis.run("all_to_all_single", sent, (tuple(give), tuple(take)))
    if axis.rank != to:
        return None
    found: dict[int, list[Owned]] = {}
    for (rows, forms, _), data in zip(every, received.split(take), strict=True):
        pieces = zip(forms, data.split([nbytes for *_, nbytes in forms]), strict=True)
        held = {name: one.clone().view(getattr(torch, kind)).reshape(shape) for (name, kind, shape, _), one in pieces}
        for number, start, stop, shown, sliced in rows:
            found.setdefault(number, []).append(Owned(number, start, stop, put_together(shown, held), sliced))
    return {number: _joined(some, shapes[number]) for number, some in sorted(found.items())}


def _joined(parts: list[Owned], shape: torch.Size) -> dict[str, Any]:
    """The state of a whole parameter, from those of its slices."""
    parts = sorted(parts, key=lambda part: part.start)
    whole = dict(parts[0].state)
    for name, value in whole.items() if parts[0].sliced else ():
        if isinstance(value, Tensor) and value.dim():
            whole[name] = torch.cat([part.state[name] for part in parts]).reshape(shape)
    return whole


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
        ValueError, TypeError: other groups, or states of another optimizer or shape; alike on ranks that own no part of
            it.
    """
    given, saved = state_dict["param_groups"], state_dict["state"]
    sizes, own = ([len(group["params"]) for group in some] for some in (given, groups))
    if sizes != own:
        raise ValueError(f"the state has groups of {sizes} parameters, but the optimizer of {own}")
    merged, found = [], []
    for mine, theirs in zip(groups, given, strict=True):
        hyper.check(theirs)
        merged.append({**mine, **theirs, "params": mine["params"]})
        part = hyper.at(merged[-1])("")
        for p, key in zip(mine["params"], theirs["params"], strict=True):
            state = our_state(optimizer_class, saved.get(key, {}))
            if state and not isinstance(part, WholeLeaves):
                loaded(whose(p), part, torch.empty_like(p, device="meta"), state)  # or raise
            found.append((p, part, state))
    return merged, found


def load_slices(
    local: torch.optim.Optimizer,
    shards: Iterable[Shard],
    groups: Iterable[dict[str, Any]],
    states: Iterator[WholeState],
) -> None:
    """Load the states of whole parameters, in order, into the optimizer of this rank's slices."""
    packed: list[dict[str, Any]] = []
    given: dict[int, Any] = {}
    numbers = itertools.count()
    for shard, group in zip(shards, groups, strict=True):
        packed.append({**without_params(group), "params": []})
        for path, own in shard.slices.items():
            p, part, state = next(states)
            if own.numel():
                packed[-1]["params"].append(number := next(numbers))
                if state:
                    given[number] = slice_state(part, state, p, own, *shard.pieces.slices[path])
    # Not by a method of a user's class, since this is no state that it has saved; torch's does so too.
    load = Optimizer.load_state_dict if isinstance(local, Optimizer) else torch.optim.Optimizer.load_state_dict
    load(cast("Any", local), {"state": given, "param_groups": packed})


def slice_state(part: Any, state: dict[str, Any], p: Tensor, own: Tensor, start: int, stop: int) -> dict[str, Any]:
    """A copy of the part of a parameter's state that belongs to a slice of it, on the parameter's device.

    Args:
        state: The state of the whole parameter, by name.
        own: The slice, from `start` to `stop` in the flat parameter `p`, or empty where another rank owns `p` as a
            whole.
    """
    found = dict(state)
    fresh = {} if isinstance(part, WholeLeaves) else state_dicts.to_state_dict(part.init_param(own.detach()))
    for name, like in fresh.items():
        if like.dim() and part.elementwise:
            found[name] = state[name].reshape(-1)[start:stop].view(own.shape)
        elif like.dim() and not own.numel() and p.numel():  # another rank owns the parameter
            found[name] = like
        elif like.dim() and not p.dim():  # the slice of a number is a vector
            found[name] = state[name].reshape(like.shape)

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(p.device if value.dim() else value.device, copy=True)

    tree: Any = found
    return cast("dict[str, Any]", optree.tree_map(copied, tree, none_is_leaf=True))
