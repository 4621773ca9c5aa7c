"""What a rank owes after a step in which matrices have travelled as two thin factors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._tree import plain
from ._factors import Block, Outcome, Owing, cut


def owing(
    blocks: list[Block], p: list[Tensor], owes: Mapping[str, Tensor], lost: list[Tensor] | None,
    old: Mapping[str, Tensor], outcome: Outcome,
) -> dict[str, Tensor]:  # fmt: skip
    """Of matrices.

    Args:
        p: Of each block the orthonormal P^T.
        owes: By path M - P Q, new memory; see `right`.
        lost: Of each block what its Q has lost on its way; None for nothing.
        old: By path what was owed before: where nothing has come of a matrix, that stays.
    """
    new: dict[str, Tensor] = {}
    for i, block in enumerate(blocks):
        for j, path in enumerate(block.paths):
            if path not in owes:
                continue
            error = owes[path]
            if lost is not None:
                add = error.addmm_ if plain([error]) else error.addmm
                error = add(p[i][j].T, lost[i][j])
            if not outcome.whole:
                error = torch.where(outcome.fine(i)[j], error, old[path].reshape(error.shape))
            new[path] = error
    return new


def owing_of_loose(
    shapes: Mapping[str, torch.Size], lost: Tensor, came: Tensor, old: Mapping[str, Tensor], share: Owing, outcome: Outcome
) -> dict[str, Tensor]:  # fmt: skip
    """Of leaves that travel as they are, encoded.

    Args:
        shapes: By path, of all of them.
        lost: What they have lost on their way, flat; `came`: their sums, flat.
        old: As for `owing`.
    """
    whole = outcome.whole and share.known and bool(torch.isfinite(came).all())
    new: dict[str, Tensor] = {}
    sizes = list(shapes.values())
    for path, error, total in zip(shapes, cut(lost, sizes), cut(came, sizes), strict=True):
        if path not in old:
            continue
        if whole:
            new[path] = error
        else:
            left = error if share.known else torch.where(share.sends, error, old[path] + error)
            new[path] = torch.where(outcome.live & torch.isfinite(total).all(), left, old[path])
    return new
