"""The weighted mean of encoded messages, of which each rank gets its piece."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes._collectives import axis_index
from ..axes._primitive import note
from ..axes._ragged import all_to_all_single
from ..codecs._codec import Codec, as_bytes, read
from ..codecs._stochastic import StochasticEncoder
from ..reductions._coded_mean import Reduced


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
    own = factor.reshape(1) if times is None else torch.stack([factor, times])
    header, rows, decoded = as_bytes(own.to(torch.float64).unsqueeze(0))[0], [], []
    at = 0
    for n in sizes:
        part = flat[at : at + n].unsqueeze(0)
        where = encoder.positions[at : at + n].unsqueeze(0) if codec.stochastic else encoder.positions
        codes = encoder.encode(part, where)[0] if n else flat.new_zeros(0, dtype=torch.uint8)
        if times is not None and n:
            decoded.append(codec.decode(codes.unsqueeze(0), n)[0])
        rows += [codes, header]
        at += n
    widths, mine = [_width(codec, n, len(header)) for n in sizes], sizes[here]
    width = widths[here]
    data = all_to_all_single(torch.cat(rows), axis, input_split_sizes=widths, output_split_sizes=[width] * ranks).view(
        ranks, width
    )
    factors = read(data[:, width - len(header) :].contiguous(), torch.float64)
    total = factors[:, 0].sum()
    one = total / total  # 1, but NaN where `total` is infinite: x / inf would be 0
    shares = torch.where(total == 0, 0.0, factors[:, -1] / total * one).to(torch.float32)
    mean = flat.new_zeros(mine)
    for row, share in zip(data.unbind(0) if mine else (), shares.unbind(0), strict=False):
        mean = mean.add_(codec.decode(row[: width - len(header)].unsqueeze(0), mine)[0] * share)
    if times is None:
        return Reduced(mean, total, words)
    coded = torch.cat([*decoded, flat[:0]])
    return Reduced(mean, total, words, (flat - coded).mul_(times.to(torch.float32)), coded)


def _width(codec: Codec, n: int, header: int) -> int:
    return (codec.width(n) if n else 0) + header
