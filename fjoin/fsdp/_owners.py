"""Leaves that an optimizer needs whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..transforms.axes import all_to_all_single
from ..transforms.layout import LocalPieces


class Owners:
    """Leaves that an optimizer needs whole: all slices of such a leaf go to one rank, which steps it, and its new values
    back.

    Args:
        rows: The slices that ranks have.
        pieces: What ranks step: slices, and of the leaves of other owners nothing.
        owner: Path -> rank.
    """

    def __init__(self, rows: LocalPieces, pieces: LocalPieces, owner: Mapping[str, int]) -> None:
        self._rows, self._pieces = rows, pieces
        dtypes = {path: bucket.dtype for bucket in rows.buckets for path in bucket.paths}
        # dtype -> the leaves of each owner: one message for each dtype.
        self._of: dict[torch.dtype, list[list[str]]] = {}
        for path, rank in owner.items():
            self._of.setdefault(dtypes[path], [[] for _ in range(rows.ranks)])[rank].append(path)

    def gather(self, *trees: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Trees of slices -> trees of what this rank steps."""
        found, ranks, me = [dict(tree) for tree in trees], range(self._rows.ranks), self._rows.rank
        for of in self._of.values():
            like = next(trees[0][path] for one in of for path in one)
            give = [[tree[path] for tree in trees for path in of[rank]] for rank in ranks]
            take = [[self._size(path, rank) for _ in trees for path in of[me]] for rank in ranks]
            parts = zip(*_exchanged(give, take, self._rows.axis, like), strict=True)
            for tree, new in zip(trees, found, strict=True):
                new |= {path: tree[path].new_zeros(self._pieces.shape(path)) for one in of for path in one}
                new |= {path: torch.cat(next(parts)).view(self._pieces.shape(path)) for path in of[me]}
        return found

    def scatter(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """A tree of what this rank steps -> a tree of slices."""
        ranks, me, found = range(self._rows.ranks), self._rows.rank, own
        for of in self._of.values():
            spans = self._rows.slices_of_all
            give = [[own[path].reshape(-1)[slice(*spans[rank][path])] for path in of[me]] for rank in ranks]
            take = [[self._size(path, me) for path in of[rank]] for rank in ranks]
            like = next(own[path] for one in of for path in one)
            parts = _exchanged(give, take, self._rows.axis, like)
            found = found | {path: part for rank in ranks for path, part in zip(of[rank], parts[rank], strict=True)}
        return found

    def _size(self, path: str, rank: int) -> int:
        start, stop = self._rows.slices_of_all[rank][path]
        return stop - start


def _exchanged(
    give: Sequence[Sequence[Tensor]], take: Sequence[Sequence[int]], axis: str, like: Tensor
) -> list[list[Tensor]]:
    """Flat tensors for each rank -> those from each rank, of these sizes.

    Args:
        like: A tensor of their dtype and device.
    """
    flat = torch.cat([like.new_zeros(0), *(part for parts in give for part in parts)])
    sizes = [sum(map(len, parts)) for parts in give]
    got = all_to_all_single(flat, axis, input_split_sizes=sizes, output_split_sizes=[*map(sum, take)])
    return [list(part.split(list(of))) for part, of in zip(got.split([*map(sum, take)]), take, strict=True)]
