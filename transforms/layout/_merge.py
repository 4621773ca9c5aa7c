"""The values of ranks, for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tree._placement import Merge

Spot = tuple[int, ...]  # a rank's place along the axes over which values differ


def merged(
    values: Mapping[Spot, Tensor], sizes: Sequence[int], place: Spot, merge: Merge, start: Tensor | None
) -> Tensor:
    """The value of one of the new ranks.

    Args:
        values: Those of all old ranks, by their place.
        sizes: The new sizes of these axes.
        place: The place of the new rank.
        merge: How they are merged; equal values are kept, where they are not summed.
        start: The value at the start of a run, for `Merge.RESTART`.

    Raises:
        ValueError: the values differ, and cannot be merged.

    >>> old = {(0,): torch.tensor(1.0), (1,): torch.tensor(2.0), (2,): torch.tensor(4.0)}
    >>> [merged(old, (2,), (rank,), Merge.SUM, None).item() for rank in range(2)]
    [5.0, 2.0]
    >>> merged(old, (4,), (3,), Merge.SUM, None).item()
    0.0
    """
    first = next(iter(values.values()))
    adds = merge in (Merge.SUM, Merge.SHARE)
    if not adds and all(_same(value, first) for value in values.values()):
        return first
    if merge is Merge.MEAN:
        return _mean(list(values.values()))
    if merge is Merge.RESTART and start is not None:
        return start
    if not adds:
        raise ValueError("the ranks had values of their own, which no rule merges for another number of ranks")
    mine = [value for old, value in sorted(values.items()) if _folded(old, sizes) == place]
    if not mine:
        return torch.zeros_like(first)
    total = torch.stack(mine).sum(0, dtype=first.dtype)
    if merge is Merge.SHARE:  # (weight, divisor): the divisor is that of the first
        total[..., 1] = mine[0][..., 1]
    return total


def _folded(old: Spot, sizes: Sequence[int]) -> Spot:
    """The new place that takes over an old one: places beyond the new sizes are folded onto the others."""
    return tuple(at % size for at, size in zip(old, sizes, strict=True))


def _mean(values: list[Tensor]) -> Tensor:
    if not values[0].is_floating_point():  # counters, such as those of a normalization
        return torch.stack(values).amax(0)
    wide = torch.stack(values).to(torch.promote_types(values[0].dtype, torch.float32))
    return wide.mean(0).to(values[0].dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal."""
    return a.shape == b.shape and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
