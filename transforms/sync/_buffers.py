"""What ranks agree on besides gradients: the running statistics that a model keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base import Transform, init_empty
from .._spec import factory
from .._tree import State, Tree, map_with_path, named_leaves
from ..axes._collectives import axis_index, axis_size, pmax, pmin, psum
from ..axes._from_one import from_one
from ..axes._primitive import AxisName
from ._mean import check_weight


@factory
def average_buffers(axis: AxisName) -> Transform:
    """The weighted mean of the ranks' buffers.

    Floating-point buffers become sum_r w_r b_r / sum_r w_r. Others, such as the counts of batches that
    torch's BatchNorm keeps, become the largest of the ranks with weight. Where all weights are 0 nothing
    changes. Means travel in float64, so that a buffer equal on all ranks stays as it is: one message for all of
    them, and one for each other dtype.

    Args:
        axis: The axis, or a tuple of axes, to average over.

    Returns:
        A `Transform` without state, for `fjoin.train_step(..., on_buffers=...)`: it takes a tree of buffers in the
        place of gradients.

    Raises:
        ValueError, UnboundAxis: at `update`, as `mean`.

    >>> from fjoin import transforms as tx
    >>> def one_rank(var, n, weight):
    ...     return tx.average_buffers("data").update({"var": torch.tensor(var), "n": torch.tensor(n)}, (), weight=weight)[0]
    >>> tx.simulate(one_rank, {"data": 2}, [1.0, 4.0], [5, 7], [2, 1])[0]
    {'var': tensor(2.), 'n': tensor(7)}
    """

    def update(buffers: Tree, state: State, params: Tree = None, *, weight: Any = None, **extra: Any) -> Any:
        del params, extra
        held = named_leaves(buffers)
        factor = check_weight(weight).to(next((b.device for b in held.values()), None))
        floats = {path: b for path, b in held.items() if b.is_floating_point()}
        counts = {path: _as_number(b) for path, b in held.items() if path not in floats}
        wide = {path: torch.where(factor > 0, b.double() * factor, 0.0) for path, b in floats.items()}
        wide, total = psum((wide, factor), axis)
        means = {path: b / total for path, b in wide.items()}
        largest = pmax({path: torch.where(factor > 0, b, torch.iinfo(b.dtype).min) for path, b in counts.items()}, axis)
        new = {
            path: torch.where(total > 0, b.to(held[path].dtype), held[path]) for path, b in {**means, **largest}.items()
        }
        return map_with_path(lambda path, _: new[path], buffers), state

    return Transform(init_empty, update, scope="leaf")


@factory
def broadcast_buffers(axis: AxisName) -> Transform:
    """The buffers of the lowest rank with weight, on all ranks; where there is none, nothing changes.

    A message of a number, then one of all bytes.

    Args:
        axis: The axis, or a tuple of axes, along which to broadcast.

    Returns:
        A `Transform` without state, as `average_buffers`.

    Raises:
        ValueError, UnboundAxis: at `update`, as `mean`.

    Same as: broadcast_buffers of torch's DistributedDataParallel, which takes rank 0's.

    >>> from fjoin import transforms as tx
    >>> def one_rank(var, weight):
    ...     return tx.broadcast_buffers("data").update(torch.tensor(var), (), weight=weight)[0]
    >>> tx.simulate(one_rank, {"data": 3}, [1.0, 4.0, 9.0], [0, 1, 1])
    [tensor(4.), tensor(4.), tensor(4.)]
    """

    def update(buffers: Tree, state: State, params: Tree = None, *, weight: Any = None, **extra: Any) -> Any:
        del params, extra
        held, here, ranks = named_leaves(buffers), axis_index(axis), axis_size(axis)
        first = pmin(torch.where(check_weight(weight).to(here.device) > 0, here, ranks), axis)
        new = {
            path: torch.where(first < ranks, b, held[path]) for path, b in from_one(held, first == here, axis).items()
        }
        return map_with_path(lambda path, _: new[path], buffers), state

    return Transform(init_empty, update, scope="leaf")


def _as_number(buffer: Tensor) -> Tensor:
    return buffer.to(torch.uint8) if buffer.dtype is torch.bool else buffer
