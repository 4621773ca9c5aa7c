"""Transforms of the optimizer's state, for methods that average parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .._axis_env import AxisName
from .._check import some_axes, whole_number
from ..axes._collectives import pmax
from ..combinators._chain import identity
from ..combinators._conditional import every
from ..combinators._partition import partition
from ..reductions._mean import mean
from ..spec._spec import factory
from ..step_param._optimizer import Optimizer
from ..step_param._state_fields import state_fields
from ..transform._call import Call
from ..transform._transform import Needs, Transform, init_empty
from ..transform._weights import Over, check_over
from ..tree._tree import State, Tree, map_with_path, named_leaves
from ._average import AverageState
from ._window import WindowMean, like

StatePolicy: TypeAlias = Literal["keep", "average", "reset"] | Mapping[str, int]


@factory
def average_state(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of the ranks' optimizer states, weighted; for `fuse(..., on_state=...)`.

    Moments and other values of a parameter's elements are averaged, as by `average_parameters`. Step counts become the
    largest of all ranks, since a rank without input has taken fewer steps.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The weights of the ranks; see `average_parameters`.

    Returns:
        A `Transform` of a tree path -> name -> tensor. State: `AverageState(hook)`.

    Raises:
        TypeError: at `init`: a value that is no mean of anything: not floating-point, or a scalar that belongs to the
            step count, such as NAdam's `mu_product`.
        ValueError, UnboundAxis: as `average_parameters`.

    >>> from fjoin import transforms as tx
    >>> tx.fuse(tx.noop(), tx.adam(0.1), on_state=tx.every(4, tx.average_state("data"))).on_state
    every(4, average_state('data'))
    """
    some_axes("average_state", axis)
    reduce = WindowMean(mean(axis), over)

    def init(values: Tree) -> AverageState:
        named = named_leaves(values)
        whole = {_split(path)[0] for path, value in named.items() if value.dim()}
        for path, value in named.items():
            param, name = _split(path)
            if name != "step" and (not value.is_floating_point() or (param in whole and not value.dim())):
                raise TypeError(
                    f"average_state: {name!r} of the state of {param!r} ({value.dtype}, shape {tuple(value.shape)}) has no "
                    f"mean; choose others, as in on_state=masked(average_state(...), '*.exp_avg')"
                )
        return AverageState(mean(axis).init(values))

    def update(values: Tree, state: AverageState, params: Tree, call: Call) -> tuple[Tree, AverageState]:
        del params
        named = named_leaves(values)
        counts = {path: value for path, value in named.items() if _split(path)[1] == "step"}
        rest = {path: value for path, value in named.items() if path not in counts}
        average, hook, live = reduce(rest, state, call)
        new = {**like(average, rest), **(pmax(counts, axis) if counts else {})}
        return map_with_path(lambda path, old: torch.where(live, new[path], old), values), AverageState(hook)

    return Transform(init, update, Needs.LEAVES | Needs.PATHS)


@factory
def reset_state(optimizer: Optimizer) -> Transform:
    """Sets the optimizer's state to its initial value, except the step count; for `fuse(..., on_state=...)`.

    Args:
        optimizer: The optimizer of the pipeline.

    Returns:
        A `Transform` without state, of a tree path -> name -> tensor. Where no rank of its parameters had input, the
        state stays.

    Raises:
        TypeError: `optimizer` is no optimizer.

    >>> from fjoin import transforms as tx
    >>> opt = tx.sgd(0.1, momentum=0.9)
    >>> p = {"w": torch.zeros(1)}
    >>> tx.reset_state(opt).update({"w": {"step": torch.tensor(3.0), "momentum": torch.ones(1)}}, (), p)[0]
    {'w': {'step': tensor(3.), 'momentum': tensor([0.])}}
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"reset_state takes the pipeline's optimizer, got {optimizer!r}")

    def update(values: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        del call
        leaves = named_leaves(params)

        def initial(path: str, value: Tensor) -> Tensor:
            param, name = _split(path)
            if name == "step":
                return value
            return state_fields({param: optimizer.at(param).init_param(leaves[param])})[param][name].to(value.device)

        return map_with_path(initial, values), state

    return Transform(init_empty, update, Needs.LEAVES | Needs.PATHS)


def _split(path: str) -> tuple[str, str]:
    """The path of the parameter, and the name in its state."""
    param, _, name = path.rpartition(".")
    return param, name


def on_state_of(
    name: str, policy: StatePolicy, optimizer: Optimizer, axis: AxisName, steps: int, first: int | None, over: Over
) -> Transform | None:
    """The transform of the optimizer's state for a policy.

    Args:
        name: The factory, for errors.
        steps, first: The calls with an average of the parameters, as for `every`.
    """
    check_over(over)
    if isinstance(policy, Mapping):
        parts: dict[str | tuple[str, ...], Transform] = {}
        for field, period in policy.items():
            whole_number(f"{name}: the period of {field!r}", period, 1)
            parts[f"*.{field}"] = every(period, average_state(axis, over))
        return partition({**parts, "*": identity()}) if parts else None
    if policy not in ("keep", "average", "reset"):
        raise ValueError(
            f"{name}: state must be 'keep', 'average', 'reset' or a dict from names of the state to periods, got {policy!r}"
        )
    if policy == "keep":
        return None
    return every(steps, average_state(axis, over) if policy == "average" else reset_state(optimizer), first)
