"""Sums and products of 16-bit tensors, computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are added: float32 for 16-bit floats, otherwise itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def widened(x: Tensor) -> Tensor:
    """A tensor in the dtype in which its numbers are added."""
    return x.to(wide_dtype(x.dtype))


def sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """The sum of tensors in their order, in their dtype; 16-bit terms are added in float32.

    It lies in memory of its own.
    """
    first, *rest = terms
    total = widened(first) + rest[0] if rest else first.clone()
    for term in rest[1:]:
        total += term
    return total.to(first.dtype)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a 0-d factor, in its dtype; a 16-bit product is rounded once."""
    wide = widened(x)
    return (wide * factor.to(wide.dtype)).to(x.dtype)


def divided(x: Tensor, divisor: Tensor) -> Tensor:
    """A tensor divided by a 0-d divisor, in its dtype; a 16-bit quotient is rounded once."""
    wide = widened(x)
    return (wide / divisor.to(wide.dtype)).to(x.dtype)


def sum_of_pieces(received: Tensor, length: int, own: Tensor | None, rank: int) -> Tensor:
    """The sum of the ranks' pieces in the order of the ranks, bit for bit that of an ordered reduction.

    It lies in memory of its own, or in that of the received pieces, so that the memory of `own` can be freed.

    Args:
        received: The pieces one after the other, without that of this rank where that is `own`; they are overwritten.
        length: The elements of a piece.
        own: This rank's piece, where it has not travelled; the sum may be written there.
    """
    rows = list(received.split(length)) if received.numel() else []
    if own is not None:
        rows.insert(rank, own)
    if not rows:
        return received
    if len(rows) == 2:  # of two ranks
        return torch.add(*rows, out=rows[0] if rows[1] is own else rows[1])
    return sum_in_order(rows)
