"""The residuals of a rank after a step in which matrices were sent as two thin factors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..tree._tree import plain
from ._factors import Block, FeedbackWeight, Finiteness, cut


def matrix_residuals(
    blocks: list[Block],
    p: list[Tensor],
    residuals: Mapping[str, Tensor],
    lost: list[Tensor] | None,
    old: Mapping[str, Tensor],
    finite: Finiteness,
) -> dict[str, Tensor]:
    """Residuals of the compressed matrices.

    Args:
        p: The orthonormal P^T of each block.
        residuals: Path -> M - P Q, new memory; see `compute_q`.
        lost: The encoding error of each block's Q; None where it is not encoded.
        old: Path -> old residual, which is kept where the sum of a matrix is not used.
    """
    new: dict[str, Tensor] = {}
    for i, block in enumerate(blocks):
        for j, path in enumerate(block.paths):
            if path not in residuals:
                continue
            error = residuals[path]
            if lost is not None:
                add = error.addmm_ if plain([error]) else error.addmm
                error = add(p[i][j].T, lost[i][j])
            if not finite.whole:
                error = torch.where(finite.fine(i)[j], error, old[path].reshape(error.shape))
            new[path] = error
    return new


def uncompressed_residuals(
    shapes: Mapping[str, torch.Size],
    lost: Tensor,
    sums: Tensor,
    old: Mapping[str, Tensor],
    share: FeedbackWeight,
    finite: Finiteness,
) -> dict[str, Tensor]:
    """Residuals of the leaves that are encoded but not compressed.

    Args:
        shapes: Path -> shape, of all these leaves.
        lost: Their encoding errors, flat.
        sums: Their sums over the ranks, flat.
        old: As for `matrix_residuals`.
    """
    whole = finite.whole and share.known and bool(torch.isfinite(sums).all())
    new: dict[str, Tensor] = {}
    sizes = list(shapes.values())
    for path, error, total in zip(shapes, cut(lost, sizes), cut(sums, sizes), strict=True):
        if path not in old:
            continue
        if whole:
            new[path] = error
        else:
            residual = error if share.known else torch.where(share.sends, error, old[path] + error)
            new[path] = torch.where(finite.live & torch.isfinite(total).all(), residual, old[path])
    return new
