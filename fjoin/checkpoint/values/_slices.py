"""Values of which each rank has a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...transforms.layout._pieces import Pieces


class Slice(NamedTuple):
    """This rank's slice of the flat value."""

    shape: torch.Size  # of the whole
    start: int
    stop: int  # 0 where this rank holds nothing
    whole: bool  # whether one rank has it as a whole, in its own shape
    holds: bool  # whether this rank writes it; of a value without elements one rank does


# From the name of a value, behind a prefix, and the paths of parameters that it may belong to, to its slice; None for another value.
Slices = Callable[[str, Sequence[str]], Slice | None]


def slices_of(pieces: Pieces) -> Slices:
    """The slices of a pipeline's state."""

    def slice_of(name: str, params: Sequence[str]) -> Slice | None:
        path = next((path for path in params if path in pieces.shapes), None)
        if path is None:
            return None
        shape, (start, stop) = pieces.shapes[path], pieces.slices[path]
        holds = bool(stop) or (not shape.numel() and not pieces.rank)
        return Slice(shape, start, stop, path in pieces.whole, holds)

    return slice_of
