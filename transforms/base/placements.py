"""The placement of a state's leaves: which ranks have which values, and what becomes of them on other ranks."""

from __future__ import annotations

import enum
import functools
from typing import Annotated, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints

T = TypeVar("T")


class Merge(enum.Enum):
    """What a run on other ranks begins with, where the ranks had values of their own."""

    SUM = "sum"  # their sum, in units of which it is one: what has not been sent yet
    SHARE = "share"  # in files from before 0.3, of (weight, divisor): the sum of the weights, and the divisor of the first rank
    MEAN = "mean"  # their mean
    RESTART = "restart"  # the value at the start
    REFUSE = "refuse"  # nothing is right


class Placement(NamedTuple):
    """The ranks that have equal values of a leaf, and what the others have.

    A host integer is equal over all axes.
    """

    equal: tuple[str, ...]  # the axes over which it is equal; in a state's life it may be equal over more
    cut: str | None = None  # the axis over which each rank has its slice of one value
    merge: Merge = Merge.REFUSE  # of the values of ranks that differ, for other numbers of ranks

    def __str__(self) -> str:
        equal = f"equal over {', '.join(self.equal)}" if self.equal else ""
        slices = f"a slice over {self.cut}" if self.cut else ""
        return ", ".join(filter(None, (slices, equal))) or "of each rank"


class Mark(enum.Enum):
    """Of a field of a state, and of all leaves inside; a field without a mark is as its state is."""

    PER_RANK = "per rank"  # each rank that a transform reduces over has its own


# Annotations of the fields of state NamedTuples: each rank has its own value, and how these are merged.
PerRank: TypeAlias = Annotated[T, Mark.PER_RANK]
Summed: TypeAlias = Annotated[T, Mark.PER_RANK, Merge.SUM]
Averaged: TypeAlias = Annotated[T, Mark.PER_RANK, Merge.MEAN]
Restarted: TypeAlias = Annotated[T, Mark.PER_RANK, Merge.RESTART]


@functools.cache
def marks(kind: type) -> dict[str, tuple[bool, Merge | None]]:
    """Field -> whether it is per rank, and its merge, of a state's class."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        notes = get_args(hint)[1:] if hasattr(hint, "__metadata__") else ()
        found[name] = Mark.PER_RANK in notes, next((note for note in notes if isinstance(note, Merge)), None)
    return found
