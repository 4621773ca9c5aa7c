"""The placement of a state's leaves: which ranks have which values."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import torch

T = TypeVar("T")


class Placement(enum.Enum):
    """The values of one leaf on the ranks."""

    REPLICATED = "replicated"  # equal on all ranks that share their gradients
    PER_RANK = "per rank"  # each rank has its own, of the same shape
    PIECE = "piece"  # each rank has its slice of one value


# Annotations of the fields of state NamedTuples, and of all leaves inside; a field without one is as its state is.
PerRank: TypeAlias = Annotated[T, Placement.PER_RANK]
Piece: TypeAlias = Annotated[T, Placement.PIECE]


def leaves_with_placement(
    state: Any, path: str = "", kind: Placement = Placement.REPLICATED
) -> Iterator[tuple[str, Placement]]:
    """(path, placement) of all tensors and numbers of a state.

    In a part that is a piece, 0-d leaves such as step counts are replicated.

    Args:
        path, kind: The path of this part, and the placement of fields without one of their own.
    """
    if hasattr(state, "_fields"):
        hints = get_type_hints(type(state), include_extras=True)
        for name, value in zip(state._fields, state, strict=True):
            marks = [mark for mark in get_args(hints[name])[1:] if isinstance(mark, Placement)]
            if marks and isinstance(value, int):
                yield f"{path}.{name}".removeprefix("."), marks[0]
                continue
            yield from leaves_with_placement(value, f"{path}.{name}", marks[0] if marks else kind)
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from leaves_with_placement(value, f"{path}.{name}", kind)
    elif isinstance(state, (tuple, list)):
        for i, value in enumerate(state):
            yield from leaves_with_placement(value, f"{path}.{i}", kind)
    elif state is not None:
        common = kind is Placement.PIECE and not (isinstance(state, torch.Tensor) and state.dim())
        yield path.removeprefix("."), Placement.REPLICATED if common or isinstance(state, int) else kind
