"""The reductions of gradients: mean, sum_over, and the mean in two levels.

A rank without input takes part with weight 0 and contributes exactly nothing. Uneven inputs need nothing more.
"""

from __future__ import annotations

import functools
from typing import Any

import optree
import torch
from torch import Tensor

from ..axes import all_gather, axis_index, axis_size, psum, psum_scatter, sum_plain
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
    init_empty,
    named_leaves,
    one_axis,
    plain,
    readable_without_sync,
    real,
    some_axes,
    to_device,
    words_dtype,
)
from ..codecs import Codec
from ._coded_sum import coded_sum, cut, encoded, ravel, unravel


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

    return Transform(init_empty, update, Needs.NOTHING, Reduction(axis, over, fusable=True), takes=("donated", "wire"))


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


@factory
def hierarchical_mean(local: str, node: str, over: Over = "weight") -> Transform:
    """The mean over two axes: the ranks inside a node, whose links are fast, and the nodes.

    It has three stages:

    - the ranks of a node sum their gradients, and each keeps one part (psum_scatter over `local`);
    - ranks with the same index in their node sum their parts (psum over `node`);
    - the ranks of a node exchange the results (all_gather over `local`).

    So each rank sends across nodes only 1 / (ranks of the node) of the bytes that a mean over all ranks would send. In
    `compress(codec, hierarchical_mean(...))` the messages between nodes are encoded.

    Args:
        local: The axis inside a node.
        node: The axis across nodes.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks. It has no state.

    Raises:
        ValueError: `over` is none of the three; `local` and `node` are the same axis.

    Same as: torch's hierarchical sharding of HYBRID_SHARD.

    >>> from fjoin import transforms as tx
    >>> hook = hierarchical_mean("local", "node")
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"node": 2, "local": 2}, [torch.tensor(v) for v in (1.0, 2.0, 3.0, 6.0)])[3]
    tensor(3.)
    """
    check_over(over)
    local, node = one_axis("hierarchical_mean: local", local), one_axis("hierarchical_mean: node", node)
    if local == node:
        raise ValueError(f"local and node must be two axes, got {local!r} for both")
    both = (local, node)

    def across(codec: Codec, x: Tensor, places: Tensor | None, feeds: bool) -> tuple[Tensor, Tensor | None]:
        """The sum of all ranks' floats, of which the nodes exchange codes: each rank those of its part."""
        inside, n = axis_size(local), len(x)
        here = to_device(x.device, axis_index(local)).view(1)
        part = psum_scatter(cut(x, inside), local)
        mine = None if places is None else cut(places, inside).index_select(0, here)[0]
        part, lost = coded_sum(node, codec, part, mine, feeds)
        if lost is not None:  # the residual of the node's message lies on the rank that has sent it
            rows = torch.arange(inside, device=x.device).unsqueeze(1) == here
            lost = torch.where(rows, lost, 0.0).flatten()[:n]
        return all_gather(part, local).flatten()[:n], lost

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        grads = optree.tree_map(torch.as_tensor, grads)
        of = named_leaves(grads)
        real(of, "hierarchical_mean")
        device = device_of(of.values())
        share = call.share(both, over, device)
        if call.wire is not None and axis_size(node) > 1:
            out = encoded(grads, share, call, across)
        else:
            flat = ravel(of.values(), device, words_dtype(leaf.dtype for leaf in of.values()))
            flat = share._replace(total=None).times(flat)
            (part,) = share.divided([psum(psum_scatter(cut(flat, axis_size(local)), local), node)])
            out = unravel(all_gather(part, local).flatten()[: len(flat)], grads)
        return (share.unless_idle(out, grads) if call.persistent else out), state

    return Transform(init_empty, update, Needs.NOTHING, Reduction(both, over), takes=("wire",))
