"""The weighted mean of encoded messages, of which each rank gets its piece."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes._collectives import axis_index
from ..axes._primitive import note
from ..axes._ragged import all_to_all_single
from ..codecs._rows import decode_pieces, encode_rows
from ..reductions._coded_mean import Reduced, Term, row_of, weighted_mean, with_error


def coded_scatter(term: Term, axis: str, out: Tensor | None = None, *, sizes: tuple[int, ...]) -> Reduced:
    """As `coded_mean`, but `mean` has only this rank's part of it, and is not sent to the others.

    Args:
        sizes: The number of floats for each rank.
    """
    del out
    note(axis, f"{term.floats.numel()} floats")
    here, ranks = int(axis_index(axis)), len(sizes)
    places = [None] * ranks if term.positions is None else term.positions.unsqueeze(0).split(sizes, dim=1)
    pieces = zip(term.floats.unsqueeze(0).split(sizes, dim=1), places, strict=True)
    codes = [encode_rows(term.codec, piece, here, positions=where) for piece, where in pieces]
    end = term.ends(1)
    rows = [row_of(code, end)[0] for code in codes]
    give, take = list(map(len, rows)), [len(rows[here])] * ranks
    data = all_to_all_single(torch.cat(rows), axis, input_split_sizes=give, output_split_sizes=take)
    reduced = weighted_mean(term, axis, data.view(ranks, take[here]), sizes[here])
    if term.times is None:
        return reduced
    return with_error(reduced, term, decode_pieces(term.codec, torch.cat(codes, dim=1)[0], sizes))
