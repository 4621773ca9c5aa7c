"""Encoding rows with codecs of which some throw dice."""

from __future__ import annotations

import torch
from torch import Tensor

from ._codec import Codec
from ._random_bits import Noise, key_of, places_of


class StochasticEncoder:
    """Encodes rows of floats, with noise where the codec takes any.

    Args:
        flat: (n,) or (rows, n), all floats of the message.
        places: (n,) int32, where each of them stands; None: as if all were one leaf.
        rank: This rank's index.
        message: A number for each message of one call.
        group: The index, among others, of the ranks that an answer goes to. It is the same whoever gives it, and so are its
            dice: which rank sums an element depends on what stands beside it.

    Raises:
        ValueError: the codec throws dice and has no key.
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
                    f"{codec!r} throws dice and needs a seed and a step; use it in compress or quantized_mean, or pass "
                    f"codec.keyed(seed, step)"
                )
            self.positions = places_of({"": flat}, flat.device) if positions is None else positions

    def encode(self, rows: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """(rows, n) at such places to (rows, width); `back`: whether it is the answer to a message."""
        if not self._codec.stochastic:
            return self._codec.encode(rows)
        assert self._codec.key is not None
        whose = self._group if back else self._rank
        own = key_of(self._codec.key, whose, 2 * self._message + back, device=rows.device)
        return self._codec.encode(rows, Noise(positions, own, key_of(self._codec.key, device=rows.device)))


def encode_rows(codec: Codec, rows: Tensor, rank: Tensor | int, message: int = 0) -> Tensor:
    """(rows, n) to (rows, width)."""
    dice = StochasticEncoder(codec, rows, None, rank, message)
    return dice.encode(rows, dice.positions.view(rows.shape) if codec.stochastic else dice.positions)
