"""The reductions of gradients: mean and sum_over.

A rank without input takes part with weight 0 and contributes exactly nothing. Uneven inputs need nothing more.
"""

from __future__ import annotations

import functools
from typing import Any

import optree
import torch
from torch import Tensor

from ..axes import axis_size, psum, sum_plain
from ..base import (
    AxisName,
    Call,
    Needs,
    Over,
    Reduction,
    Share,
    State,
    Transform,
    Tree,
    check_over,
    decode_words,
    device_of,
    encode_words,
    factory,
    plain,
    readable_without_sync,
    some_axes,
    words_dtype,
)
from ._coded_sum import coded_sum, encoded


def _reduction(axis: AxisName, over: Over | None) -> Transform:
    """`mean`, or the weighted sum where `over` is None."""
    some_axes("sum_over" if over is None else "mean", axis)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        del params
        leaves, structure = optree.tree_flatten(grads)
        leaves = [torch.as_tensor(leaf) for leaf in leaves]
        share = share_of(call, axis, over, device_of(leaves))
        if call.wire is not None and axis_size(axis) > 1:
            out = encoded(optree.tree_unflatten(structure, leaves), share, call, functools.partial(coded_sum, axis))
        else:
            out = optree.tree_unflatten(structure, mean_of(leaves, share, axis, call.donated and not call.persistent))
        return (share.unless_idle(out, grads) if call.persistent else out), state

    return Transform(
        lambda params: (), update, Needs.NOTHING, Reduction(axis, over, fusable=True), takes=("donated", "wire")
    )


def share_of(call: Call, axis: AxisName, over: Over | None, device: torch.device | None) -> Share:
    """This rank's share in a mean, or its weight in a sum."""
    if over is not None:
        return call.share(axis, over, device)
    if call.persistent:
        return call.share(axis, "weight", device)._replace(total=None)
    return Share(call.totals((), device).weight, None)


def mean_of(leaves: list[Tensor], share: Share, axis: AxisName, donated: bool = False) -> list[Tensor]:
    """The means, or the sums, of leaves over the ranks; they may be written over `donated` leaves."""
    late = share.behind_sum(leaves)
    own = (share._replace(total=None) if late else share).of(leaves, donated)
    sums = sum_plain(own, axis, () if donated else leaves) if plain(own) else psum(own, axis)
    return share.divided(sums) if late else sums


def mean_with_words(part: Transform, grads: Tree, call: Call, words: Tensor) -> tuple[Tree, Tensor] | None:
    """A plain `mean` or `sum_over` whose message carries more: the sum of weight * gradient, divided by the sum of the weights.

    Args:
        part: The transform.
        call: Of its first stage.
        words: (n,) float64, of which the first two are `Call.totals`.

    Returns:
        The mean, which may lie in the memory of donated gradients, and the sum of the words over the ranks. None for gradients
        whose sums need the share to fit: float16.
    """
    of, own, (leaves, structure) = part.reduces, call.totals(), optree.tree_flatten(grads)
    assert of is not None
    if not all([isinstance(leaf, Tensor) and leaf.dtype is not torch.float16 for leaf in leaves]):
        return None
    weight = own.weight if of.over in (None, "weight") else own.live
    ranks, dtype = axis_size(of.axis), words_dtype([leaf.dtype for leaf in leaves])
    sent = [*Share(weight, None).of(leaves, call.donated), encode_words(words, dtype, ranks)]
    # By the same collective on all ranks, whatever their weights.
    *sums, summed = sum_plain(sent, of.axis, () if call.donated else leaves) if plain(sent) else psum(sent, of.axis)
    found = decode_words(summed, ranks)
    total: Any = {"weight": found[0], "live": found[1], "world": float(ranks), None: 1.0}[of.over]
    total = float(total) if readable_without_sync(found) else total
    return optree.tree_unflatten(structure, Share(weight, total).divided(sums)), found


@factory
def mean(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of all ranks' gradients, weighted.

    With w_r the weight of rank r, and [c] = 1 if c holds, 0 otherwise:

        over="weight"   sum_r w_r g_r       / sum_r w_r
        over="live"     sum_r [w_r > 0] g_r / sum_r [w_r > 0]
        over="world"    sum_r [w_r > 0] g_r / size of the axis

    The ranks agree on the sum of their weights first, in a message of 16 bytes; over the world they need none. Then each
    sends its share of the mean, in the gradient's dtype, so that a message fits where the mean does. In `fuse` and in a
    train_step a plain mean costs no message for that: there the sum of weight * gradient is divided behind the message, by
    the weight that it has carried. Where all weights are 0, the result is 0. Numbers of 16 bits are added in float32 and
    rounded once, but for gloo's and NCCL's own all-reduce, which adds two ranks' values at a time in the dtype of the
    message.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        It has no state.

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
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks. It has no state.

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
