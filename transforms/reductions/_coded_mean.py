"""A weighted mean of encoded rows: a rank sends at most twice its codes, however many ranks there are.

On three and more ranks every rank reduces one chunk of the gradients. It receives the bytes of that chunk from all
ranks (all_to_all), decodes them, takes their weighted mean in float32, and sends the mean to all ranks, encoded again
(all_gather). On two ranks each rank sends all its bytes to the other, as many as in the two messages above, and both
take the same mean: one exchange, encoded once.

Every row ends with the weight, in float64. The words of the lane are summed like the gradients: each rank sums some of
them. Of several buckets only the first one's rows have such an end: its weights are those of all buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._check import AxisName
from .._devices import is_host
from ..axes._collectives import axis_index, axis_size
from ..axes._gather_scatter import all_gather, all_to_all
from ..axes._primitive import names, note
from ..codecs._codec import Codec, as_bytes, read
from ..codecs._rows import encode_rows
from ..transform._rider import EMPTY, Rider
from ..tree._tree import plain, to_device

Map: TypeAlias = Callable[[Tensor], Tensor]
Key: TypeAlias = Tensor | int  # of the random bits of a stochastic codec; see `encode_rows`
# Floats that are decoded at a time: all ranks' floats do not fit a CPU's cache, and much memory is not given to one launch.
_DECODED, _DECODED_IN_A_LAUNCH = 2**17, 2**25


class Term(NamedTuple):
    """This rank's term of a mean, and its form in messages."""

    codec: Codec
    floats: Tensor  # (n,) float32; finite where `factor` is 0
    factor: Tensor  # its weight in the sum, 0-d float64, at least 0
    words: Tensor  # the words of the lane, (words,) float64
    # The multiplier of `floats`, where it is not `factor`; `lost` and `coded` are then computed.
    times: Tensor | None = None
    positions: Tensor | None = None  # (n,) int32, the position of each float, for a stochastic codec; see `places_of`
    rider: Rider = EMPTY  # the owner of the words

    def ends(self, rows: int) -> Tensor:
        """The end of every row, (rows, words) float64: the weight, `times` if it is given, and a part of the words."""
        if not self.rider.goes_along:
            return self.words.view(1, 0).expand(rows, 0)
        head = [self.factor] if self.times is None else [self.factor, self.times]
        share = -(-len(self.words) // rows)
        return torch.cat([*(x.view(1, 1).expand(rows, 1) for x in head), cut(self.words, rows, share)], dim=1)


class Parts(NamedTuple):
    """The parts of the ranks in a mean."""

    total: Tensor  # the sum of their weights, 0-d float64
    each: tuple[Tensor, ...]  # the factors of their floats, 0-d float32


class Reduced(NamedTuple):
    mean: Tensor  # (n,) float32
    total: Tensor  # the sum of the factors, 0-d float64
    words: Tensor  # sums over the ranks of the lane's words, (words,) float64
    # The encoding error of times * floats, plus that of total * mean in the chunk that this rank summed, (n,) float32.
    lost: Tensor | None = None
    coded: Tensor | None = None  # where `lost` is computed: `floats` as the other ranks decode them, (n,) float32


def coded_mean(term: Term, axis: AxisName, out: Tensor | None = None) -> Reduced:
    """sum_r factor_r floats_r / sum_r factor_r over encoded messages; 0 where all factors are 0.

    Args:
        axis: The axis. Of several axes the last is reduced first, and its result over the others.
        out: A buffer for the mean, (n,) float32. It may be the floats, which are not read after that. It is used on two
            ranks only.

    Raises:
        ValueError: `times` is given for several axes.
    """
    if term.times is not None and len(names(axis)) > 1:
        raise ValueError(
            f"error feedback is over one axis, got {axis!r}; write chain(error_feedback(a), error_feedback(b)), one mean for each"
        )
    for i, name in reversed(list(enumerate(names(axis)))):
        # Ranks with equal inputs must use equal random bits.
        rank, group = (axis_index(names(axis)[:n]) if term.codec.stochastic else 0 for n in (i + 1, i))
        ranks = axis_size(name)
        if ranks == 1:
            mean = torch.where(term.factor > 0, term.floats, torch.zeros_like(term.floats))
            reduced = Reduced(mean, term.factor, term.words)
        elif ranks == 2:
            reduced = _sent(term, name, 1, lambda rows: all_gather(rows[0], name), rank, i, out)  # noqa: B023
        else:
            reduced = _in_chunks(term, name, rank, group, i)
        term = term._replace(floats=reduced.mean, factor=reduced.total, words=reduced.words)
    return reduced


def _in_chunks(term: Term, axis: str, rank: Key, group: Key, message: int) -> Reduced:
    """The mean in two messages: every rank reduces one chunk, and sends its mean to all ranks."""
    ranks, n = axis_size(axis), len(term.floats)
    reduced = _sent(term, axis, ranks, lambda rows: all_to_all(rows, axis), rank, message)
    mean, size, lost = reduced.mean, len(reduced.mean), reduced.lost
    here, places = torch.empty(0), None  # the index of this rank is only copied to a device where it is used
    if term.positions is not None or lost is not None:
        here = to_device(term.floats.device, axis_index(axis))
    if term.positions is not None:
        places = cut(term.positions, ranks, size).index_select(0, here.view(1))
    answer = encode_rows(term.codec, mean.unsqueeze(0), group, message, places, answer=True)
    back, words = _split(term.codec, all_gather(row_of(answer, reduced.words.unsqueeze(0))[0], axis), size)
    if lost is not None:
        again = encoding_error(mean, term.codec.decode(answer, size)[0], reduced.total)
        is_here = torch.arange(ranks, device=again.device).unsqueeze(1) == here
        lost = lost + torch.where(is_here, again, 0.0).flatten()[:n]
    mean = term.codec.decode(back, size).flatten()[:n]
    return reduced._replace(mean=mean, words=words.flatten()[: len(term.words)], lost=lost)


def _sent(
    term: Term, axis: AxisName, rows: int, move: Map, rank: Key, message: int, out: Tensor | None = None
) -> Reduced:
    """The mean of the rows that `move` brings, from this rank's floats and words in as many rows as it sends."""
    n = len(term.floats)
    size = -(-n // rows)
    note(axis, f"{n} floats")
    places = None if term.positions is None else cut(term.positions, rows, size)
    codes = encode_rows(term.codec, cut(term.floats, rows, size), rank, message, places)
    reduced = weighted_mean(term, axis, move(row_of(codes, term.ends(rows))), size, out)
    return reduced if term.times is None else with_error(reduced, term, term.codec.decode(codes, size).flatten()[:n])


def with_error(reduced: Reduced, term: Term, coded: Tensor) -> Reduced:
    """The reduction with the error of this rank's message, which the other ranks decode as `coded`."""
    assert term.times is not None
    return reduced._replace(lost=encoding_error(term.floats, coded, term.times), coded=coded)


def encoding_error(x: Tensor, decoded: Tensor, times: Tensor) -> Tensor:
    return (x - decoded).mul_(times.to(torch.float32))


def cut(x: Tensor, rows: int, size: int) -> Tensor:
    """(n,) as (rows, size), padded with zeros at the end."""
    gap = rows * size - x.numel()
    return (torch.nn.functional.pad(x, (0, gap)) if gap else x).view(rows, size)


def weighted_mean(term: Term, axis: AxisName, data: Tensor, n: int, out: Tensor | None = None) -> Reduced:
    """The weighted mean of the ranks' rows, the sum of the weights and the sums of the words.

    Args:
        term: This rank's term; the ends of its rows are like those of the others.
        n: The number of floats of a row.
    """
    codes, ends = _split(term.codec, data, n)
    sums, head = term.words, 1 if term.times is None else 2
    if term.rider.goes_along:
        sums = ends.sum(0)

    def parts() -> Parts:
        total = sums[0]
        one = total / total  # 1, but NaN where `total` is infinite: x / inf would be 0
        # If no rank has weight, flushed residuals are ignored.
        each = torch.where(total == 0, 0.0, ends[:, head - 1] / total * one).to(torch.float32)
        return Parts(total, each.unbind(0))

    total, (first, *others) = term.rider.once(f"parts over {axis}", parts)
    rows = _decoded(term.codec, codes, n)
    mean = torch.mul(next(rows), first, out=out)
    for row, factor in zip(rows, others, strict=True):
        mean = mean.addcmul_(row, factor) if plain(row) else mean.addcmul(row, factor)
    return Reduced(mean, total, sums[head:] if term.rider.goes_along else sums)


def _decoded(codec: Codec, codes: Tensor, n: int) -> Iterator[Tensor]:
    """The rows, decoded a few at a time. No variable keeps a row, so that its memory serves the next ones."""
    floats = _DECODED if is_host(codes.device) else _DECODED_IN_A_LAUNCH
    for some in codes.split(max(1, floats // max(1, n))):
        yield from codec.decode(some, n).unbind(0)


def row_of(codes: Tensor, words: Tensor) -> Tensor:
    """(rows, bytes): codes, padded to whole float64 words, then this rank's words."""
    if gap := -codes.shape[1] % 8:
        codes = torch.nn.functional.pad(codes, (0, gap))
    return torch.cat([codes, as_bytes(words)], dim=1) if words.shape[1] else codes


def _split(codec: Codec, data: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The codes of n floats, and the end, (rows, words), of rows of bytes."""
    width = codec.width(n)
    return data[:, :width], read(data[:, width + -width % 8 :], torch.float64)
