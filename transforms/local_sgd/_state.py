"""Transforms of the optimizer's state, for methods that average parameters."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from .._check import AxisName, some_axes
from ..axes._collectives import pmax
from ..combinators._conditional import every
from ..reductions._mean import mean
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._transform import Needs, Transform
from ..transform._weights import Over, check_over
from ..tree._tree import Tree, map_with_path, named_leaves
from ._average import AverageState
from ._window import WindowMean, like

StatePolicy: TypeAlias = Literal["keep", "average"]


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


def _split(path: str) -> tuple[str, str]:
    """The path of the parameter, and the name in its state."""
    param, _, name = path.rpartition(".")
    return param, name


def on_state_of(
    name: str, policy: StatePolicy, axis: AxisName, steps: int, first: int | None, over: Over
) -> Transform | None:
    """The transform of the optimizer's state for a policy.

    Args:
        name: The factory, for errors.
        steps, first: The calls with an average of the parameters, as for `every`.
    """
    check_over(over)
    if policy not in ("keep", "average"):
        raise ValueError(
            f"{name}: state must be 'keep' or 'average', got {policy!r}; for others use fuse(..., on_state=...)"
        )
    return None if policy == "keep" else every(steps, average_state(axis, over), first)
