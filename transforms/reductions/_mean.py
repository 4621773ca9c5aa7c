"""The reductions of gradients: mean, sum_over, noop.

A rank without input takes part with weight 0 and contributes exactly nothing. Uneven inputs need nothing more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._axis_env import AxisName
from .._bucketwise import FirstBucket
from .._check import some_axes
from .._lane import Lane, check_lane, decode_lane, encode_lane
from .._lane import lane_dtype as dtype_of_lane
from .._spec import factory
from .._sums import divided
from .._transform import Needs, Reduction, Transform, init_empty
from .._tree import Tree, device_of, plain
from .._weights import Over, Unit, check_over, lacks_unit, nonzero_or_one, share_of, unit_near, unless_idle
from ..axes._collectives import axis_size, psum
from ..axes._primitive import sum_donated
from ..codecs._codec import Codec
from ._encoded_mean import encoded_mean
from ._residuals import ResidualMemory


class MeanState(NamedTuple):
    """The total weight and the lane of the last message."""

    total: Tensor  # the divisor of the sum, 0-d float64
    lane: dict[str, Tensor]  # the sums of the lane by name, 0-d float64


def init_mean(params: Tree) -> MeanState:
    del params
    return MeanState(torch.zeros((), dtype=torch.float64), {})


def _weighted_sum(
    grads: Tree, axis: AxisName, weight: Any, lane: Lane | None, over: Over, first_bucket: FirstBucket | None,
    dtype: torch.dtype | None, unit: float | None, donated: bool = False,
) -> tuple[Tree, MeanState, Unit]:  # fmt: skip
    """The sum times a unit that makes it fit the gradients' dtype, and the unit; written over `donated` gradients."""
    share, (leaves, structure) = share_of(weight, over), optree.tree_flatten(grads)

    def add(waiting: list[int], unit: Unit, *words: Tensor) -> list[Tensor]:
        """Replace these leaves by their sums; returns the sum of the words."""
        sent = [*(share.times(leaves[i], unit) for i in waiting), *words]
        summed = sum_donated(sent, axis) if donated and plain(sent) else psum(sent, axis)
        for i, total in zip(waiting, summed, strict=False):
            leaves[i] = total
        return summed[len(waiting) :]

    # These wait for the sum of the weights, which is no float16 and so travels apart from them in any case.
    waits = [lacks_unit(unit, [leaf]) for leaf in leaves]
    early, late = ([i for i, wait in enumerate(waits) if wait is last] for last in (False, True))
    scale: Unit = unit or 1.0
    if first_bucket is not None:
        add(early, scale)
        new = state_of_first(first_bucket)
    else:
        check_lane(lane)
        n, full = axis_size(axis), {"total": share.factor, **(lane or {})}
        words = encode_lane(full, dtype or dtype_of_lane(leaf.dtype for leaf in leaves), n, device_of(leaves))
        sums = decode_lane(add(early, scale, words)[0], full, n)
        new = MeanState(sums.pop("total"), sums)
    if late:
        scale = unit_near(new.total)
        add(late, scale)
    return optree.tree_unflatten(structure, leaves), new, scale


def _reduction(axis: AxisName, over: Over | None) -> Transform:
    """`mean`, or the weighted sum where `over` is None."""
    some_axes("sum_over" if over is None else "mean", axis)

    def update(
        grads: Tree, state: MeanState, params: Tree = None, *, weight: Any = None, lane: Lane | None = None,
        first_bucket: FirstBucket | None = None, lane_dtype: torch.dtype | None = None, wire: Codec | None = None,
        memory: ResidualMemory | None = None, donated: bool = False, persistent: bool = False, unit: float | None = None,
        **extra: Any,
    ) -> tuple[Tree, MeanState]:  # fmt: skip
        del state, params, extra
        grads = optree.tree_map(torch.as_tensor, grads)
        if wire is not None and axis_size(axis) > 1:
            out, total, sums = encoded_mean(
                wire,
                grads,
                axis,
                weight,
                over,
                None if first_bucket else lane,
                memory,
                donated=donated,
                persistent=persistent,
            )
            return out, mean_state(total, sums, first_bucket)
        summed, new, scale = _weighted_sum(
            grads, axis, weight, lane, over or "weight", first_bucket, lane_dtype,
            unit if unit is None or over in (None, "weight") else 1.0, donated and not persistent,
        )  # fmt: skip
        counted = new.total
        if over is None:
            if isinstance(scale, Tensor) or scale != 1.0:
                summed = optree.tree_map(lambda g: divided(g, torch.as_tensor(scale)), summed)
            return unless_idle(counted, summed, grads, persistent), new
        if over == "world" and first_bucket is None:
            new = new._replace(total=torch.full_like(new.total, axis_size(axis)))
        divisor = nonzero_or_one(new.total)
        leaves = optree.tree_leaves(summed)
        if leaves and plain(leaves) and all(leaf.dtype.itemsize >= 4 for leaf in leaves):  # they are fresh, or donated
            torch._foreach_div_(leaves, divisor * scale)
        else:
            summed = optree.tree_map(lambda g: divided(g, divisor * scale), summed)
        return unless_idle(counted, summed, grads, persistent), new

    return Transform(init_mean, update, Needs.NOTHING, Reduction(lambda state: state, axis, over, fusable=True))


def mean_state(total: Tensor, lane: dict[str, Tensor], first_bucket: FirstBucket | None) -> MeanState:
    """The state after a call, from the call's own message or from the first bucket's."""
    return MeanState(total, lane) if first_bucket is None else state_of_first(first_bucket)


def state_of_first(first_bucket: FirstBucket) -> MeanState:
    state = first_bucket.get()
    if not isinstance(state, MeanState):
        raise TypeError(
            f"extra['first_bucket'] gave a {type(state).__name__} where this stage's own MeanState was expected; a transform that "
            f"runs another must hand on first_bucket.substate(field) of its state"
        )
    return state


@factory
def mean(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of all ranks' gradients, weighted.

    With w_r the weight of rank r, and [c] = 1 if c holds, 0 otherwise:

        over="weight"   sum_r w_r g_r       / sum_r w_r
        over="live"     sum_r [w_r > 0] g_r / sum_r [w_r > 0]
        over="world"    sum_r [w_r > 0] g_r / size of the axis

    The weight and the lane are sent in the same message as the gradients. Where all weights are 0, the result is 0.

    The message holds the sum of weight * gradient in the gradient's dtype. For float16 it is multiplied by a power of
    two near 1 / the sum of the weights, so that it fits where the mean does: the weights are summed first. Numbers of
    16 bits are added in float32 and rounded once, but for gloo's and NCCL's own all-reduce, which adds two ranks'
    values at a time in the dtype of the message.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`, the sums from the last message.

    Raises:
        ValueError: `over` is none of the three; `axis` names none, or one twice; at `update`: the weight is neither 0
            nor from 1e-30 to 1e30.
        TypeError: `axis` is no name.
        UnboundAxis: at `update`: nothing binds `axis`.

    Same as: the all-reduce of torch's DDP; over="world" and "live" are
        divide_by_initial_world_size=True and False of torch's Join.

    >>> from fjoin import transforms as tx
    >>> def one_rank(g, n):
    ...     hook = tx.mean("data")
    ...     return hook.update(g, hook.init(g), weight=n)[0]
    >>> tx.simulate(one_rank, {"data": 3}, [1.0, 4.0, 9.0], [2, 1, 0])
    [tensor(2.), tensor(2.), tensor(2.)]
    """
    check_over(over)

    return _reduction(axis, over)


@factory
def sum_over(axis: AxisName) -> Transform:
    """The weighted sum of all ranks' gradients, sum_r w_r g_r, without a division.

    Args:
        axis: The axis, or a tuple of axes, to sum over.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`; `total` is the sum of the weights.

    Raises:
        ValueError, TypeError, UnboundAxis: as `mean`.

    >>> from fjoin import transforms as tx
    >>> def one_rank(g):
    ...     hook = tx.sum_over("data")
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [1.0, 4.0])
    [tensor(5.), tensor(5.)]
    """

    return _reduction(axis, None)


@factory
def noop() -> Transform:
    """Sends nothing: every rank keeps its own gradients.

    It is the upper bound of the time that any hook can save, and the hook for methods that average parameters.

    Same as: torch's ddp_comm_hooks.debugging_hooks.noop_hook.

    >>> from fjoin import transforms as tx
    >>> tx.noop().update(torch.tensor(2.0), ())
    (tensor(2.), ())
    """

    def update(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        del params, extra
        return grads, state

    return Transform(init_empty, update, Needs.NOTHING)
