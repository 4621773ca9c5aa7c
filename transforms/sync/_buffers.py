"""Synchronization of buffers, such as a model's running statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes import axis_index, axis_size, from_one, pmax, pmin, psum
from ..base import AxisName, Call, Facts, Needs, State, Transform, Tree, factory, shares, trees


@factory
def average_buffers(axis: AxisName) -> Transform:
    """The weighted mean of the ranks' buffers.

    Floating-point and complex buffers become sum_r w_r b_r / sum_r w_r. Other buffers, such as the batch counts of
    torch's BatchNorm, become the maximum over the ranks with weight. Where all weights are 0, nothing changes. Means
    are sent in float64, so a buffer that is equal on all ranks does not change, and counts in int64; there is one
    message for each kind.

    Args:
        axis: The axis, or a tuple of axes, to average over.

    Returns:
        A `Transform` for `fjoin.train_step(..., on_buffers=...)`: it takes a tree of buffers in place of gradients.
        It has no state.

    Raises:
        TypeError: at `update`: a buffer of uint64 or of a quantized dtype.
        ValueError, UnboundAxis: at `update`, as `mean`.

    >>> from fjoin import transforms as tx
    >>> def one_rank(var, n, weight):
    ...     return tx.average_buffers("data").update({"var": torch.tensor(var), "n": torch.tensor(n)}, (), weight=weight)[0]
    >>> tx.simulate(one_rank, {"data": 2}, [1.0, 4.0], [5, 7], [2, 1])[0]
    {'var': tensor(2.), 'n': tensor(7)}
    """

    def update(buffers: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        held = trees.named_leaves(buffers)
        factor = trees.to_device(trees.device_of(held.values()), shares.check_weight(call.weight))
        has = factor > 0
        wide = {path: _wide(path, b) for path, b in held.items()}
        terms = {path: torch.where(has, b * factor, 0.0) for path, b in wide.items() if b.is_floating_point()}
        counts = {path: torch.where(has, b, _LEAST) for path, b in wide.items() if path not in terms}
        terms, total = psum((terms, factor), axis)
        found = {**{path: b / total for path, b in terms.items()}, **pmax(counts, axis)}
        new = {path: _narrow(torch.where(total > 0, found[path], wide[path]), b) for path, b in held.items()}
        return trees.map_with_path(lambda path, _: new[path], buffers), state

    return Transform(lambda params: (), update, Needs.LEAVES, facts=Facts(equalizes=axis))


@factory
def broadcast_buffers(axis: AxisName) -> Transform:
    """The buffers of the lowest rank with weight, on all ranks; without such a rank nothing changes.

    It sends one message with one number, then one message with all bytes.

    Args:
        axis: The axis, or a tuple of axes, along which to broadcast.

    Returns:
        A `Transform`, as `average_buffers`.

    Raises:
        ValueError, UnboundAxis: at `update`, as `mean`.

    Same as: broadcast_buffers of torch's DistributedDataParallel, which takes rank 0's.

    >>> from fjoin import transforms as tx
    >>> def one_rank(var, weight):
    ...     return tx.broadcast_buffers("data").update(torch.tensor(var), (), weight=weight)[0]
    >>> tx.simulate(one_rank, {"data": 3}, [1.0, 4.0, 9.0], [0, 1, 1])
    [tensor(4.), tensor(4.), tensor(4.)]
    """

    def update(buffers: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        held, ranks = trees.named_leaves(buffers), axis_size(axis)
        here = trees.to_device(trees.device_of(held.values()), axis_index(axis))
        first = pmin(torch.where(trees.to_device(here.device, shares.check_weight(call.weight)) > 0, here, ranks), axis)
        new = {
            path: torch.where(first < ranks, b, held[path]) for path, b in from_one(held, first == here, axis).items()
        }
        return trees.map_with_path(lambda path, _: new[path], buffers), state

    return Transform(lambda params: (), update, Needs.LEAVES, facts=Facts(equalizes=axis))


_LEAST = torch.iinfo(torch.int64).min


def _wide(path: str, buffer: Tensor) -> Tensor:
    """The buffer as float64, with complex numbers as pairs, or as int64: both represent its values exactly."""
    if buffer.is_complex():
        return torch.view_as_real(buffer.resolve_conj()).double()
    if buffer.is_floating_point():
        return buffer.double()
    if buffer.dtype is torch.uint64 or buffer.is_quantized:
        raise TypeError(f"buffers[{path!r}] has dtype {buffer.dtype}, which has no mean here; use int64, or a float")
    return buffer.long()


def _narrow(wide: Tensor, like: Tensor) -> Tensor:
    return (torch.view_as_complex(wide) if like.is_complex() else wide).to(like.dtype)
