"""The pieces that are bound in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ..axes._collectives import axis_index, axis_size
from ..tree._tree import Tree, flatten_in_insertion_order
from ._pieces import Pieces, cut


class _Bound(threading.local):
    pieces: Pieces | None = None


_BOUND = _Bound()


def bound_pieces() -> Pieces | None:
    """The pieces bound in this thread."""
    return _BOUND.pieces


@contextlib.contextmanager
def bind_pieces(pieces: Pieces | None) -> Iterator[None]:
    """Bind pieces in this thread inside a with block, for transforms that shard and for those behind them."""
    before, _BOUND.pieces = _BOUND.pieces, pieces
    try:
        yield
    finally:
        _BOUND.pieces = before


def pieces_here(tree: Tree, axis: str) -> Pieces:
    """The bound pieces; without them, those of a tree of elementwise parameters, in one bucket per dtype and device."""
    if (bound := bound_pieces()) is not None:
        return bound
    paths, leaves, _ = flatten_in_insertion_order(tree)
    named: dict[str, Any] = dict(zip(paths, leaves, strict=True))
    return cut(named, None, axis, axis_size(axis), int(axis_index(axis)), 2**62, 2**62)
