"""Values of which each rank has a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


# From the name of a value to its slice; None for a name of no parameter.
Slices = Callable[[str], Slice | None]


def slices_of(pieces: Pieces) -> Slices:
    """The slices of a pipeline's state, by names such as "optimizer.layer.w.exp_avg"."""

    def slice_of(name: str) -> Slice | None:
        part, _, rest = name.removeprefix("inner.").partition(".")
        path = next((path for path in _inside(rest, part) if path in pieces.shapes), None)
        if path is None:
            return None
        shape, (start, stop) = pieces.shapes[path], pieces.slices[path]
        holds = bool(stop) or (not shape.numel() and not pieces.rank)
        return Slice(shape, start, stop, path in pieces.whole, holds)

    return slice_of


def _inside(name: str, part: str) -> Iterator[str]:
    """Where a path may stand in the name of a value of a pipeline's part, longest first.

    The optimizer's state is the tree of the parameters; states of transforms end with dicts by path.
    """
    words = name.split(".")
    for length in range(len(words), 0, -1):
        starts = range(len(words) - length + 1)
        for start in (
            starts[:1] if part == "optimizer" else starts[-1:] if part in ("hook", "after", "gather") else starts
        ):
            yield ".".join(words[start : start + length])
