"""Encoding rows with codecs that may be stochastic."""

from __future__ import annotations

import torch
from torch import Tensor

from ._codec import Codec
from ._random_bits import Noise, key_of, places_of


class StochasticEncoder:
    """Encodes rows of floats, with random bits for stochastic codecs.

    Args:
        flat: (n,) or (rows, n), all floats of the message.
        positions: (n,) int32, the position of each float; None: as if all were one leaf.
        rank: This rank's index.
        message: A number for each message of one call.
        group: The index of the group of ranks that receives the answer to a message. It keys the random bits of
            answers, so they do not depend on the rank that sums an element, which depends on the bucket layout.

    Raises:
        ValueError: the codec is stochastic and has no key.
    """

    def __init__(
        self, codec: Codec, flat: Tensor, positions: Tensor | None, rank: Tensor | int, message: int = 0,
        group: Tensor | int = 0,
    ) -> None:  # fmt: skip
        self._codec, self._rank, self._message, self._group = codec, rank, message, group
        self.positions = flat.new_zeros(0, dtype=torch.int32)
        if codec.stochastic:
            if codec.key is None:
                raise ValueError(
                    f"{codec!r} is stochastic and needs a seed and a step; use it in compress or quantized_mean, or "
                    f"pass codec.keyed(seed, step)"
                )
            self.positions = places_of({"": flat}, flat.device) if positions is None else positions

    def encode(self, rows: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """Encode (rows, n) at these positions as (rows, width).

        Args:
            back: Whether this is the answer to a message.
        """
        if not self._codec.stochastic:
            return self._codec.encode(rows)
        assert self._codec.key is not None
        sender = self._group if back else self._rank
        own = key_of(self._codec.key, sender, 2 * self._message + back, device=rows.device)
        return self._codec.encode(rows, Noise(positions, own, key_of(self._codec.key, device=rows.device)))


def encode_rows(codec: Codec, rows: Tensor, rank: Tensor | int, message: int = 0) -> Tensor:
    """Encode (rows, n) as (rows, width)."""
    encoder = StochasticEncoder(codec, rows, None, rank, message)
    return encoder.encode(rows, encoder.positions.view(rows.shape) if codec.stochastic else encoder.positions)
