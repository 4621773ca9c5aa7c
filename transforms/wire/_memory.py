"""Where a reduction that encodes finds, and leaves, what messages have lost."""

from __future__ import annotations

from torch import Tensor


class Memory:
    """The errors of one call: `error` is read, and `new` filled, by path, by the reduction that encodes."""

    def __init__(self, error: dict[str, Tensor], flush: bool) -> None:
        self.error, self.flush = error, flush
        self.new: dict[str, Tensor] = {}
