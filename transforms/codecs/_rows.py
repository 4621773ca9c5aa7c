"""Rows of floats as rows of bytes, with random bits for stochastic codecs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ._codec import Codec
from ._random_bits import Noise, key_of, places_of


def encode_rows(
    codec: Codec,
    rows: Tensor,
    sender: Tensor | int,
    message: int = 0,
    positions: Tensor | None = None,
    answer: bool = False,
) -> Tensor:
    """Encode (rows, n) as (rows, width).

    Args:
        sender: The index of this rank. For an answer the index of the group of ranks that receives it, so that its random
            bits do not depend on the rank that sums an element, which depends on the bucket layout.
        message: A number for each message of one call.
        positions: (rows, n) int32, the position of each float; None: as if all were one leaf.
        answer: Whether this is the answer to a message.

    Raises:
        ValueError: the codec is stochastic and has no key.
    """
    if not codec.stochastic:
        return codec.encode(rows)
    if codec.key is None:
        raise ValueError(
            f"{codec!r} is stochastic and needs a seed and a step; use it in compress or quantized_mean, or "
            f"pass codec.keyed(seed, step)"
        )
    if positions is None:
        positions = places_of({"": rows}, rows.device).view(rows.shape)
    own = key_of(codec.key, sender, 2 * message + answer, device=rows.device)
    return codec.encode(rows, Noise(positions, own, key_of(codec.key, device=rows.device)))


def encode_pieces(codec: Codec, pieces: Iterable[Tensor], sender: Tensor | int) -> Tensor:
    """The bytes of pieces of any lengths, each a message of its own, one after the other."""
    return torch.cat([encode_rows(codec, piece.reshape(1, -1), sender, i)[0] for i, piece in enumerate(pieces)])


def decode_pieces(codec: Codec, data: Tensor, sizes: Sequence[int]) -> Tensor:
    """The floats of rows of bytes that lie one after the other, `sizes[i]` of row i; flat."""
    widths = [codec.width(n) for n in sizes]
    if len(set(sizes)) == 1:
        return codec.decode(data.view(len(sizes), widths[0]), sizes[0]).flatten()
    rows = zip(data.split(widths), sizes, strict=True)
    return torch.cat([codec.decode(row.unsqueeze(0), n)[0] for row, n in rows])
