"""The exponential moving average of the parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base import Call, Needs, State, Transform, Tree, checks, factory, shares, trees


class EmaState(NamedTuple):
    started: Tensor  # whether the average has a value, 0-d bool
    average: dict[str, Tensor]  # path -> average, in the parameter's shape, at least float32


@factory
def ema(decay: float) -> Transform:
    """Keeps the exponential moving average of the parameters, and leaves the parameters unchanged.

        average <- decay average + (1 - decay) p;  the first time: average <- p

    A step without effect, or a rank's step without input, leaves the average unchanged. Where ranks average their
    parameters, put it after that average: `every(4, chain(average_parameters("data"), ema(0.99)))`.

    Args:
        decay: The share of the old average, from 0 to below 1.

    Returns:
        A `Transform` of parameters, for `fuse(..., after=...)`. State: `EmaState(started, average)`; `ema_params`
        gives the averages as a tree.

    Raises:
        ValueError: `decay` out of range.

    Same as: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay).

    >>> from fjoin import transforms as tx
    >>> average, p = tx.ema(0.5), {"w": torch.tensor(1.0)}
    >>> state = average.init(p)
    >>> for value in 1.0, 3.0:
    ...     _, state = average.update({"w": torch.tensor(value)}, state)
    >>> tx.ema_params(p, state)
    {'w': tensor(2.)}
    """
    if not (checks.is_finite(decay) and 0 <= decay < 1):
        raise ValueError(f"ema: decay must be a number from 0 to below 1, got {decay!r}")

    def init(params: Tree) -> EmaState:
        return EmaState(torch.zeros((), dtype=torch.bool), trees.zeros_at_least_f32(params))

    def update(values: Tree, state: EmaState, params: Tree, call: Call) -> tuple[Tree, EmaState]:
        has = shares.check_weight(call.weight) > 0
        named = trees.named_leaves(values)
        device = trees.device_of(named.values())
        has, started = trees.to_device(device, has), trees.to_device(device, state.started)
        whole = torch.ones((), dtype=torch.float64, device=device)
        share = torch.where(has, torch.where(started, whole * (1 - decay), whole), torch.zeros_like(whole))
        new = {}
        for path, value in named.items():
            old = state.average[path]
            new[path] = torch.lerp(old, value.to(old.dtype), trees.to_device(old.device, share, old.dtype))
        return values, EmaState(started | has, new)

    return Transform(init, update, Needs.VALUES)


def ema_params(params: Tree, state: State) -> Tree:
    """The averages kept by an `ema`, as a tree like `params`, to evaluate the model with.

    Args:
        params: The parameters.
        state: A state that holds an `EmaState` somewhere: that of a pipeline, `train_state.pipeline`, or of `after`;
            for the average of buffers `train_state.on_buffers`.

    Returns:
        A tree with the structure, dtypes and devices of `params`; `params` itself before the first average.

    Raises:
        ValueError: no `ema` in the state, several, or one of other parameters.

    >>> from fjoin import transforms as tx
    >>> p = {"w": torch.tensor(1.0)}
    >>> tx.ema_params(p, tx.fuse(tx.identity(), tx.sgd(0.1), tx.ema(0.9)).init(p))
    {'w': tensor(1.)}
    """
    found = trees.nodes(state, EmaState)
    if len(found) != 1:
        raise ValueError(
            f"the state holds {len(found)} averages of ema(...), expected one; pass the state that has it, "
            f"such as state.pipeline of a train_step, or state.on_buffers for the average of its buffers"
        )
    started, average = found[0]
    if trees.named_leaves(params).keys() != average.keys():
        raise ValueError(f"the average is of {sorted(average)}, but params has {sorted(trees.named_leaves(params))}")
    return trees.map_with_path(
        lambda path, p: torch.where(
            trees.to_device(p.device, started), trees.to_device(p.device, average[path], p.dtype), p
        ),
        params,
    )
