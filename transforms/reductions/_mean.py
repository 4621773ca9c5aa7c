"""The reductions of gradients: mean and sum_over.

A rank without input takes part with weight 0 and contributes exactly nothing. Uneven inputs need nothing more.
"""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from ..axes import axis_size, psum, sum_donated
from ..base import (
    AxisName,
    Call,
    Over,
    RankWeight,
    Rider,
    Transform,
    Tree,
    Unit,
    check_over,
    decode_words,
    device_of,
    divided,
    divisor_of,
    factory,
    first_of,
    lacks_unit,
    no_words,
    nonzero_or_one,
    plain,
    some_axes,
    unit_near,
)
from ._coded_sum import Sums, encoded_mean, reduction


def _weighted_sum(
    grads: Tree, axis: AxisName, share: RankWeight, rider: Rider, unit: float | None, donated: bool
) -> tuple[Sums, Unit]:
    """The sum times a unit that makes it fit the gradients' dtype, and the unit; written over `donated` gradients."""
    leaves, structure = optree.tree_flatten(grads)

    def add(waiting: list[int], unit: Unit, *words: Tensor) -> list[Tensor]:
        """Replace these leaves by their sums; returns the sum of the words."""
        sent = [*(share.times(leaves[i], unit) for i in waiting), *words]
        summed = sum_donated(sent, axis) if donated and plain(sent) else psum(sent, axis)
        for i, total in zip(waiting, summed, strict=False):
            leaves[i] = total
        return summed[len(waiting) :]

    # These wait for the sum of the weights, which is no float16 and so travels apart from them in any case.
    waits = [lacks_unit(unit, leaf) for leaf in leaves]
    early, late = ([i for i, wait in enumerate(waits) if wait is last] for last in (False, True))
    scale: Unit = unit or 1.0
    if rider.goes_along:
        words = rider.words(rider.dtype(leaves), axis_size(axis), device_of(leaves), share.factor)
        total, sums = first_of(decode_words(add(early, scale, words)[0], axis_size(axis)))
    else:
        add(early, scale)
        total, sums = rider.total, no_words()
    if late:
        scale = unit_near(total)
        add(late, scale)
    return Sums(optree.tree_unflatten(structure, leaves), total, sums), scale


def _reduction(axis: AxisName, over: Over | None) -> Transform:
    """`mean`, or the weighted sum where `over` is None."""
    some_axes("sum_over" if over is None else "mean", axis)

    def reduce(grads: Tree, share: RankWeight, rider: Rider, call: Call) -> Sums:
        if call.wire is not None and axis_size(axis) > 1:
            return encoded_mean(grads, axis, share, over, rider, call)
        unit = call.unit if call.unit is None or over in (None, "weight") else 1.0
        donated = call.donated and not call.persistent
        (summed, total, words, _), scale = _weighted_sum(grads, axis, share, rider, unit, donated)
        if over is None:
            if isinstance(scale, Tensor) or scale != 1.0:
                summed = optree.tree_map(lambda g: divided(g, torch.as_tensor(scale)), summed)
            return Sums(summed, total, words)
        divisor = nonzero_or_one(divisor_of(over, total, axis_size(axis)))
        leaves = optree.tree_leaves(summed)
        if leaves and plain(leaves) and all(leaf.dtype.itemsize >= 4 for leaf in leaves):  # they are fresh, or donated
            torch._foreach_div_(leaves, divisor * scale)
        else:
            summed = optree.tree_map(lambda g: divided(g, divisor * scale), summed)
        return Sums(summed, total, words)

    return reduction(axis, over, reduce, fusable=True, takes=("donated", "wire"))


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

    # A step on buckets does not call this one: `AllReduceHook` of fjoin/step sums, and the optimizer's kernel divides.
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
