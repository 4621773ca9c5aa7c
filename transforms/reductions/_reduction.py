"""A reduction as a transform: gradients, this rank's factor and a rider go in, sums come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from .._check import AxisName, axis_names
from ..axes._collectives import axis_size
from ..transform._call import Call
from ..transform._rider import Rider
from ..transform._transform import Needs, Reduction, Transform
from ..transform._weights import Over, RankWeight, divisor_of, share_in, unless_idle
from ..tree._placement import Merge
from ..tree._tree import Tree


class MeanState(NamedTuple):
    """The total weight and the lane of the last message."""

    total: Annotated[Tensor, Merge.RESTART]  # the divisor of the sum, 0-d float64
    lane: dict[str, Tensor]  # the sums of the lane by name, 0-d float64

    @property
    def unread(self) -> tuple[str, ...]:
        """The fields that no later call reads: a checkpoint leaves them out, and a dict may have had other names in it."""
        return ("total", "lane")


def init_mean(params: Tree) -> MeanState:
    del params
    return MeanState(torch.zeros((), dtype=torch.float64), {})


class Sums(NamedTuple):
    """The result of a reduction."""

    out: Tree  # like the gradients
    total: Tensor  # the sum of the ranks' factors, 0-d float64
    rider: Tensor  # the sums of the rider, (scalars,) float64; not read where this call carries none
    kept: Tree = None  # the gradients in the form of `out`, where that is another one


Reduce: TypeAlias = Callable[[Tree, RankWeight, Rider, Call], Sums]


def reduction(
    axis: AxisName,
    over: Over | None,
    reduce: Reduce,
    needs: Needs = Needs.NOTHING,
    *,
    fusable: bool = False,
    scatters: bool = False,
    **fields: Any,
) -> Transform:
    """A transform that is one reduction, with a `MeanState` as state.

    Args:
        over: The divisor; None for a sum.
        reduce: `(gradients, factor, rider, call) -> sums`. It sums this rank's factor and the words of the rider in the
            message of the gradients.
        fusable, scatters: See `Reduction`.
        fields: The other fields of the transform.
    """

    def update(grads: Tree, state: MeanState, params: Tree, call: Call) -> tuple[Tree, MeanState]:
        del state, params
        grads = optree.tree_map(torch.as_tensor, grads)
        rider = Rider(call)
        found = reduce(grads, share_in(call, over or "weight"), rider, call)
        total, lane = rider.settle(found.total, found.rider)
        divisor = total
        if over == "world":  # of all axes, behind another reduction
            before = call.group.axes if call.group is not None else ()
            divisor = divisor_of(over, total, axis_size(tuple(dict.fromkeys((*before, *axis_names(axis))))))
        kept = grads if found.kept is None else found.kept
        return unless_idle(total, found.out, kept, call.persistent), MeanState(divisor, lane)

    reduces = Reduction(lambda state: state, axis=axis, over=over, fusable=fusable, scatters=scatters)
    return Transform(init_mean, update, needs, reduces, **fields)
