"""A weighted mean of encoded rows: a rank sends at most twice its codes, however many ranks there are.

On three and more ranks every rank reduces one chunk of the gradients. It receives the bytes of that chunk from all
ranks (all_to_all), decodes them, takes their weighted mean in float32, and sends the mean to all ranks, encoded again
(all_gather). On two ranks each rank sends all its bytes to the other, as many as in the two messages above, and both
take the same mean: one exchange, encoded once.

Every row ends with the weight, in float64. The words of the lane are summed like the gradients: each rank sums some of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._axis_env import AxisName
from .._tree import plain, to_device
from ..axes._collectives import all_gather, all_to_all, axis_index, axis_size
from ..axes._primitive import names, note
from ..codecs._codec import Codec, as_bytes, read
from ..codecs._stochastic import StochasticEncoder


class Reduced(NamedTuple):
    mean: Tensor  # (n,) float32
    total: Tensor  # the sum of the factors, 0-d float64
    words: Tensor  # sums over the ranks of the lane's words, (words,) float64
    # The encoding error of times * flat, plus that of total * mean in the chunk that this rank summed, (n,) float32.
    lost: Tensor | None = None
    coded: Tensor | None = None  # where `lost` is requested: `flat` as the other ranks decode it, (n,) float32


def coded_mean(
    codec: Codec, flat: Tensor, factor: Tensor, words: Tensor, axis: AxisName, times: Tensor | None = None,
    positions: Tensor | None = None, map_mean: Callable[[Tensor], Tensor] = lambda mean: mean,
    out: Tensor | None = None,
) -> Reduced:  # fmt: skip
    """sum_r factor_r flat_r / sum_r factor_r over encoded messages; 0 where all factors are 0.

    Args:
        flat: (n,) float32, this rank's values; finite where `factor` is 0.
        factor: This rank's weight in the sum, 0-d float64, at least 0.
        words: The words of the lane, (words,) float64.
        axis: The axis. Of several axes the last is reduced first, and its result over the others.
        times: The multiplier of this rank's floats, where it is not `factor`. If given, `lost` and `coded` are
            computed.
        positions: The position of each float, for a stochastic codec; see `places_of`.
        map_mean: Applied to the mean before it is sent.
        out: A buffer for the mean, (n,) float32. It may be `flat`, which is not read after that. It is used on two
            ranks only.

    Raises:
        ValueError: `times` is given for several axes.
    """
    if times is not None and len(names(axis)) > 1:
        raise ValueError(
            f"error feedback is over one axis, got {axis!r}; write chain(error_feedback(a), error_feedback(b)), one mean for each"
        )
    for i, name in reversed(list(enumerate(names(axis)))):
        note(name, f"{flat.numel()} floats")
        # Ranks with equal inputs must use equal random bits.
        rank, group = (axis_index(names(axis)[:n]) if codec.stochastic and n else 0 for n in (i + 1, i))
        encoder = StochasticEncoder(codec, flat, positions, rank, i, group)
        reduced = _over_one(codec, encoder, flat, factor, words, name, times, map_mean, out)
        flat, factor, words = reduced.mean, reduced.total, reduced.words
    return reduced


def _over_one(
    codec: Codec, encoder: StochasticEncoder, flat: Tensor, factor: Tensor, words: Tensor, axis: str,
    times: Tensor | None, map_mean: Callable[[Tensor], Tensor], out: Tensor | None,
) -> Reduced:  # fmt: skip
    ranks, n = axis_size(axis), flat.numel()
    if ranks == 1:
        return Reduced(torch.where(factor > 0, flat, torch.zeros_like(flat)), factor, words)
    if ranks == 2:
        reduced = _gathered(codec, encoder, flat, factor, words, axis, times, out)
        return reduced._replace(mean=map_mean(reduced.mean))
    own = factor.reshape(1) if times is None else torch.stack([factor, times])
    head, here = len(own), to_device(flat.device, axis_index(axis))
    size, share = -(-n // ranks), -(-len(words) // ranks)  # each rank's part of the floats, and of the words
    chunks, parts = cut(flat, ranks, size), torch.cat([own.expand(ranks, head), cut(words, ranks, share)], dim=1)
    positions = cut(encoder.positions, ranks, size) if codec.stochastic else encoder.positions
    codes = encoder.encode(chunks, positions)
    rows, header = read_rows(codec, all_to_all(row_of(codes, parts), axis), size, head + share)
    mean, total = weighted_mean(iter(rows.unbind(0)), header[:, :head])
    mean = map_mean(mean)
    coded = encoder.encode(
        mean.unsqueeze(0), positions.index_select(0, here.view(1)) if codec.stochastic else positions, back=True
    )
    back, summed = read_rows(
        codec, all_gather(row_of(coded, header[:, head:].sum(0, keepdim=True))[0], axis), size, share
    )
    lost = decoded = None
    if times is not None:
        is_here = torch.arange(ranks, device=flat.device).unsqueeze(1) == here
        again = torch.where(
            is_here, encoding_error(mean, codec.decode(coded, size)[0], total), torch.zeros_like(chunks)
        )
        decoded = codec.decode(codes, size)
        lost = (encoding_error(chunks, decoded, times) + again).flatten()[:n]
        decoded = decoded.flatten()[:n]
    return Reduced(back.flatten()[:n], total, summed.flatten()[: len(words)], lost, decoded)


def gathered_mean(
    codec: Codec, flat: Tensor, factor: Tensor, words: Tensor, axis: AxisName, times: Tensor | None = None,
    positions: Tensor | None = None, out: Tensor | None = None,
) -> Reduced:  # fmt: skip
    """`coded_mean` in which every rank receives all ranks' codes and takes the mean itself.

    It encodes once and sends ranks / 2 times the bytes.
    """
    note(axis, f"{flat.numel()} floats")
    encoder = StochasticEncoder(codec, flat, positions, axis_index(axis) if codec.stochastic else 0)
    return _gathered(codec, encoder, flat, factor, words, axis, times, out)


def _gathered(
    codec: Codec, encoder: StochasticEncoder, flat: Tensor, factor: Tensor, words: Tensor, axis: AxisName,
    times: Tensor | None, out: Tensor | None,
) -> Reduced:  # fmt: skip
    own = factor.reshape(1) if times is None else torch.stack([factor, times])
    codes, mine = encoder.encode(flat.unsqueeze(0), encoder.positions.unsqueeze(0)), torch.cat([own, words])
    data = all_gather(row_of(codes, mine.unsqueeze(0))[0], axis)
    header, n = _words(data, len(mine)), flat.numel()
    each = data[:, : codec.width(n)].split(1)
    rows = (codec.decode(row, n)[0] for row in each)  # one at a time: all of them do not fit a cache
    mean, total = weighted_mean(rows, header[:, : len(own)], out)
    summed = header[:, len(own) :].sum(0)
    if times is None:
        return Reduced(mean, total, summed)
    coded = codec.decode(codes, n)[0]
    return Reduced(mean, total, summed, encoding_error(flat, coded, times), coded)


def encoding_error(x: Tensor, decoded: Tensor, times: Tensor) -> Tensor:
    return (x - decoded).mul_(times.to(torch.float32))


def cut(x: Tensor, rows: int, size: int) -> Tensor:
    """(n,) as (rows, size), padded with zeros at the end."""
    return torch.nn.functional.pad(x, (0, rows * size - x.numel())).view(rows, size)


def weighted_mean(rows: Iterator[Tensor], header: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weighted mean of rows, and the sum of the weights; the last word of a row's header is its multiplier."""
    total = header[:, 0].sum()
    one = total / total  # 1, but NaN where `total` is infinite: x / inf would be 0
    # If no rank has weight, flushed residuals are ignored.
    first, *others = torch.where(total == 0, 0.0, header[:, -1] / total * one).to(torch.float32).unbind(0)
    mean = torch.mul(next(rows), first, out=out)
    for row, factor in zip(rows, others, strict=True):
        mean = mean.addcmul_(row, factor) if plain(row) else mean.addcmul(row, factor)
    return mean, total


def row_of(codes: Tensor, words: Tensor) -> Tensor:
    """(rows, bytes): codes, padded to whole float64 words, then this rank's words."""
    if gap := -codes.shape[1] % 8:
        codes = torch.nn.functional.pad(codes, (0, gap))
    return torch.cat([codes, as_bytes(words)], dim=1) if words.shape[1] else codes


def read_rows(codec: Codec, data: Tensor, n: int, words: int) -> tuple[Tensor, Tensor]:
    """The floats, (rows, n), and the words, (rows, words), of rows of bytes."""
    return codec.decode(data[:, : codec.width(n)], n), _words(data, words)


def _words(data: Tensor, words: int) -> Tensor:
    return read(data[:, data.shape[1] - 8 * words :], torch.float64)
