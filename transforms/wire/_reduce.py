"""A weighted mean of rows of bytes: as many bytes per rank however many ranks there are.

On three ranks and more every rank takes one chunk of the gradients: it gets all ranks' bytes of that chunk
(all_to_all), decodes them, takes their weighted mean in float32, and sends that to all, encoded again
(all_gather). On two ranks each sends all its bytes to the other, as many as in the two messages above, and
both take the same mean: one message, encoded once. The weight stands behind the codes of every row, in float64; the words of the
lane are summed as the gradients are, each rank taking some of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..axes._collectives import all_gather, all_to_all, axis_size
from ..axes._primitive import AxisName, names
from ._codec import Codec, as_bytes, read


class Reduced(NamedTuple):
    mean: Tensor  # (n,) float32
    total: Tensor  # the sum of the factors, 0-d float64
    words: Tensor  # sums over the ranks of the lane's words, (words,) float64


def coded_mean(codec: Codec, flat: Tensor, factor: Tensor, words: Tensor, axis: AxisName) -> Reduced:
    """sum_r factor_r flat_r / sum_r factor_r, with the floats encoded while they travel; 0 where all factors are.

    Args:
        flat: (n,) float32, this rank's; finite where `factor` is 0.
        factor: What this rank counts, 0-d float64, at least 0.
        words: Of the lane, (words,) float64.
        axis: The axis; of several, the last is reduced first, and the others what it gave.
    """
    for name in reversed(names(axis)):
        flat, factor, words = _over_one(codec, flat, factor, words, name)
    return Reduced(flat, factor, words)


def _over_one(codec: Codec, flat: Tensor, factor: Tensor, words: Tensor, axis: str) -> Reduced:
    ranks, n = axis_size(axis), flat.numel()
    if ranks == 1:
        return Reduced(torch.where(factor > 0, flat, torch.zeros_like(flat)), factor, words)
    if ranks == 2:
        mine = torch.cat([factor.reshape(1), words])
        rows, said = _read(codec, all_gather(_row(codec, flat.unsqueeze(0), mine.unsqueeze(0))[0], axis), n, len(mine))
        mean, total = _mean(rows, said[:, 0])
        return Reduced(mean, total, said[:, 1:].sum(0))
    size, share = -(-n // ranks), -(-len(words) // ranks)  # each rank's part of the floats, and of the words
    cut = torch.cat([factor.expand(ranks, 1), _cut(words, ranks, share)], dim=1)
    rows, said = _read(codec, all_to_all(_row(codec, _cut(flat, ranks, size), cut), axis), size, 1 + share)
    part, total = _mean(rows, said[:, 0])
    summed = said[:, 1:].sum(0)
    rows, said = _read(codec, all_gather(_row(codec, part.unsqueeze(0), summed.unsqueeze(0))[0], axis), size, share)
    return Reduced(rows.flatten()[:n], total, said.flatten()[: len(words)])


def _cut(x: Tensor, rows: int, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, rows * size - x.numel())).view(rows, size)


def _mean(rows: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean of rows, and the sum of the weights."""
    total = factors.sum()
    parts = factors / torch.where(total == 0, torch.ones_like(total), total)
    factor = parts.to(torch.float32)
    mean = rows[0] * factor[0]
    for row, part in zip(rows[1:], factor[1:], strict=True):
        mean = torch.addcmul(mean, row, part)
    return mean, total


def _row(codec: Codec, x: Tensor, words: Tensor) -> Tensor:
    """(rows, bytes): codes, padded to whole float64 words, then words of this rank."""
    codes = codec.encode(x)
    if gap := -codes.shape[1] % 8:
        codes = torch.nn.functional.pad(codes, (0, gap))
    return torch.cat([codes, as_bytes(words)], dim=1) if words.shape[1] else codes


def _read(codec: Codec, data: Tensor, n: int, words: int) -> tuple[Tensor, Tensor]:
    """Of rows of bytes the floats, (rows, n), and the words, (rows, words)."""
    rows = codec.decode(data[:, : codec.width(n)], n)
    return rows, read(data[:, data.shape[1] - 8 * words :], torch.float64)
