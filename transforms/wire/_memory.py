"""Where a reduction that encodes finds, and leaves, what messages have lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Memory:
    """The errors of one call: `error` is read, and `keep` called, by the reduction that encodes.

    It remembers those of the paths in `error`. Of others, such as of a mean that is encoded only by a codec around the whole,
    nothing is owed, and nothing kept.

    Attributes:
        error: By path what this rank still owes.
        flush: Whether a rank of weight 0 sends what it owes.
        per_rank: Whether each rank must keep what it has lost itself, and say what the others decode of it.
        new: By path what it owes afterwards.
        coded: Where `per_rank`, by path what the others decode of this rank's message.
    """

    def __init__(self, error: dict[str, Tensor], flush: bool, per_rank: bool = False) -> None:
        self.error, self.flush, self.per_rank = error, flush, per_rank
        self.new: dict[str, Tensor] = {}
        self.coded: dict[str, Tensor] = {}

    def owed(self, of: Mapping[str, Tensor]) -> list[Tensor]:
        """What is owed of leaves, in their order."""
        return [
            self.error[path] if path in self.error else torch.zeros_like(leaf, dtype=torch.float32)
            for path, leaf in of.items()
        ]

    def keep(self, paths: Iterable[str], left: Iterable[Tensor]) -> None:
        """Raises ValueError where something has been kept of a path already."""
        for path, value in zip(paths, left, strict=True):
            if path not in self.error:
                continue
            if path in self.new:
                raise ValueError(
                    f"the gradient at {path!r} is encoded twice inside one error feedback, which has one memory; write "
                    f"chain(error_feedback(a), error_feedback(b))"
                )
            self.new[path] = value
