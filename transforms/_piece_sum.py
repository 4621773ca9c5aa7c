"""The sum of one rank's piece of a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._sums import sum_of_pieces

if TYPE_CHECKING:
    from ._axis_env import Axis


class PieceSum:
    """The sum of this rank's piece of a flat buffer, under way: each rank sends every other rank its piece.

    Attributes:
        total: After the wait: the sum of the elements of all pieces, where the transport has computed it.
    """

    total: float | None = None

    def __init__(self, axis: Axis, flat: Tensor, bounds: Sequence[int], rank: int) -> None:
        sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        (start, stop), ranks = bounds[rank : rank + 2], len(sizes)
        give, take = list(sizes), [stop - start] * ranks
        # The own part does not travel where the parts for the others are adjacent.
        stays = rank in (0, ranks - 1)
        self._own = flat[start:stop] if stays else None
        self._rank, self._length = rank, stop - start
        if stays:
            flat = flat[stop:] if rank == 0 else flat[:start]
            give[rank] = take[rank] = 0
        self._received: Any = axis.begin("all_to_all_single", flat, (tuple(give), tuple(take)))

    def arrived(self) -> bool:
        """Whether all pieces have arrived, so that `wait` would not wait."""
        arrived = getattr(self._received, "arrived", None)
        return arrived is not None and bool(arrived())

    def wait(self) -> Tensor:
        """The sum, once; no gradient of the buffer is needed after that."""
        received, own, self._received, self._own = self._received(), self._own, None, None
        return sum_of_pieces(received, self._length, own, self._rank)
