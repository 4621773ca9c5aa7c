"""The weighted mean of encoded messages, of which each rank gets its piece."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes._collectives import axis_index
from ..axes._primitive import note
from ..axes._ragged import all_to_all_single
from ..codecs._codec import Codec
from ..codecs._stochastic import StochasticEncoder
from ..reductions._coded_mean import Reduced, encoding_error, read_rows, row_of, weighted_mean


def coded_scatter(
    codec: Codec, flat: Tensor, factor: Tensor, words: Tensor, axis: str, times: Tensor | None = None,
    positions: Tensor | None = None, out: Tensor | None = None, *, sizes: tuple[int, ...],
) -> Reduced:  # fmt: skip
    """As `coded_mean`, but `mean` has only this rank's part of it, and is not sent to the others.

    Args:
        sizes: The number of floats for each rank.
    """
    del out
    note(axis, f"{flat.numel()} floats")
    here, ranks = int(axis_index(axis)), len(sizes)
    encoder = StochasticEncoder(codec, flat, positions, here if codec.stochastic else 0)
    own = (factor.reshape(1) if times is None else torch.stack([factor, times])).unsqueeze(0)
    places = encoder.positions.split(sizes) if codec.stochastic else [encoder.positions] * ranks
    rows = [
        row_of(encoder.encode(part.unsqueeze(0), where.unsqueeze(0)), own)[0]
        for part, where in zip(flat.split(sizes), places, strict=True)
    ]
    give, take = list(map(len, rows)), [len(rows[here])] * ranks
    data = all_to_all_single(torch.cat(rows), axis, input_split_sizes=give, output_split_sizes=take).view(ranks, -1)
    values, header = read_rows(codec, data, sizes[here], own.shape[1])
    mean, total = weighted_mean(iter(values.unbind(0)), header)
    if times is None:
        return Reduced(mean, total, words)
    coded = torch.cat(
        [codec.decode(row[: codec.width(n)].unsqueeze(0), n)[0] for row, n in zip(rows, sizes, strict=True)]
    )
    return Reduced(mean, total, words, encoding_error(flat, coded, times), coded)
