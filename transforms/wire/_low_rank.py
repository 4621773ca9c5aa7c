"""Sums of matrices over ranks that travel as two thin factors.

A matrix M of rows x columns is summed as P Q, where the rows of P^T, as many as the rank, are orthonormal. Factors are stored
with the rank first, P^T as (rank, rows) and Q as (rank, columns): their products with a matrix are several times faster so.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .._tree import plain
from ..axes._collectives import axis_size, psum
from ..axes._primitive import AxisName
from ._codec import Codec
from ._reduce import coded_mean

_BITS = 0xFFFFFFFF


def draw(seed: int, name: str, step: int, rank: int, columns: int, like: Tensor) -> Tensor:
    """(rank, columns) numbers in (-1, 1), float64 where `like` is so, else float32: a hash of its arguments, on its device.

    >>> draw(0, "w", 0, 1, 3, torch.zeros(())).shape
    torch.Size([1, 3])
    """
    key = zlib.crc32(f"{seed}/{step}/{name}".encode())
    x = torch.arange(rank * columns, dtype=torch.int64, device=like.device)
    x = (x * 0x9E3779B1 + key) & _BITS
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # the finalizer lowbias32, twice
        x = ((x ^ (x >> shift)) * factor) & _BITS
    x = x ^ (x >> 16)
    unit = (x.to(torch.float64) + 0.5) / 2**31 - 1.0
    return unit.to(torch.promote_types(like.dtype, torch.float32)).view(rank, columns)


class Share(NamedTuple):
    """What this rank counts in a sum."""

    factor: Tensor  # of its gradients, 0-d float64
    known: float | None  # the same, where it is known on the host
    flush: bool  # whether it sends its errors where the factor is 0

    def owed(self, grad: Tensor, error: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What it is to send of a leaf, factor * gradient + error; None for nothing."""
        grad, error = grad.to(dtype), None if error is None else error.to(dtype)
        if self.known == 0.0:  # 0 * nan would be nan
            return error if self.flush else None
        if self.known is not None:
            if error is not None:
                return torch.add(error, grad, alpha=self.known)
            return grad if self.known == 1.0 else grad * self.known
        own = torch.where(self.factor > 0, grad * self.factor.to(dtype), torch.zeros_like(grad))
        return own if error is None else torch.where(self.sends, own + error, torch.zeros_like(own))

    @property
    def sends(self) -> Tensor:
        return (self.factor > 0) | self.flush


class Exchange(NamedTuple):
    """How floats and the words of the lane are summed."""

    axis: AxisName
    wire: Codec | None  # the form of the floats; the words are then float64
    feeds: bool  # whether what `wire` loses is asked for

    def __call__(self, parts: list[Tensor], words: Tensor) -> tuple[list[Tensor], Tensor, list[Tensor] | None]:
        """The sums of the parts and of the words, in one message, and what this rank's message has lost of the parts."""
        if not parts and not words.numel():
            return [], words, None
        if self.wire is None:
            *sums, told = psum([*parts, words], self.axis) if words.numel() else [*psum(parts, self.axis), words]
            return sums, told, None
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else words.new_zeros(0, dtype=torch.float32)
        one = words.new_ones(())
        reduced = coded_mean(self.wire, flat, one, words, self.axis, one if self.feeds else None)
        lost = None if reduced.lost is None else _like(reduced.lost, parts)
        return _like(reduced.mean * axis_size(self.axis), parts), reduced.words, lost


def _like(flat: Tensor, parts: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([part.numel() for part in parts]) if parts else ()
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class Block(NamedTuple):
    """Matrices of one shape: on a CPU one, since a batch of several would be a copy and gain nothing there."""

    paths: tuple[str, ...]
    shape: tuple[int, int]  # rows, columns
    sent: Tensor | None  # what this rank sends, (matrices, rows, columns); None for nothing
    start: Tensor  # (matrices, rank, columns)


def blocks_of(leaves: Mapping[str, Tensor], sent: Mapping[str, Tensor | None], q: Mapping[str, Tensor]) -> list[Block]:
    """The matrices that `q` has a factor for, cut into blocks; `sent`: what this rank sends of each."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, start in q.items():
        alone = path if leaves[path].device.type == "cpu" else None
        groups.setdefault((leaves[path].shape[0], *start.shape, alone), []).append(path)
    made = []
    for paths in groups.values():
        rows, columns = leaves[paths[0]].shape[0], q[paths[0]].shape[1]
        given = [s.reshape(rows, columns) for path in paths if (s := sent[path]) is not None]
        made.append(
            Block(tuple(paths), (rows, columns), _stack(given) if given else None, _stack([q[p] for p in paths]))
        )
    return made


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def left(block: Block) -> Tensor:
    """This rank's part of P^T = Q M^T: (matrices, rank, rows)."""
    if block.sent is None:
        return block.start.new_zeros(*block.start.shape[:2], block.shape[0])
    return torch.bmm(block.start, block.sent.mT)


def right(block: Block, p: Tensor) -> Tensor:
    """This rank's part of Q = P^T M: (matrices, rank, columns)."""
    return torch.zeros_like(block.start) if block.sent is None else torch.bmm(p, block.sent)


def orthonormal(p: Tensor, epsilon: float) -> Tensor:
    """(matrices, rank, rows) with orthonormal rows that span the same; where these are dependent, with others besides.

    By Householder's QR, which was the fastest of what is safe where rows are nearly dependent, and which scales what it squares.
    """
    u, r = torch.linalg.qr(p.mT)
    u = u.mT
    if epsilon:
        size = torch.diagonal(r, dim1=-2, dim2=-1).abs().unsqueeze(-1)
        u = u * (size / (size + epsilon))
    return u


class Outcome(NamedTuple):
    """Which rows and matrices are to be taken as they are."""

    scales: list[Tensor]  # of each block the largest absolute values of Q's rows, (matrices, rank, 1)
    live: Tensor  # 0-d bool: some rank counts
    whole: bool  # known on the host: some rank counts, everything is finite, and no row is 0

    def fine(self, i: int) -> Tensor:
        """Of each matrix of a block whether what came has an effect, (matrices, 1, 1)."""
        return self.live & torch.isfinite(self.scales[i]).all(dim=1, keepdim=True)


def look(qs: list[Tensor], counted: Tensor) -> Outcome:
    scales, live = [q.abs().amax(dim=2, keepdim=True) for q in qs], counted != 0
    told = torch.cat([scale.reshape(-1) for scale in scales]) if scales else counted.view(1)
    whole = False
    if type(told) is Tensor and told.device.type == "cpu" and plain([told, counted]):  # nothing has to be waited for
        whole = bool(live & (told > 0).all() & torch.isfinite(told).all())
    return Outcome(scales, live, whole)


def next_start(block: Block, q: Tensor, i: int, outcome: Outcome, fresh: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The factor that the next step starts from: this step's, with new rows in the place of those that are 0."""
    scale = outcome.scales[i]
    if outcome.whole:
        return q / scale
    dead = scale == 0
    scaled = q / torch.where(dead, torch.ones_like(scale), scale)
    new = _stack([fresh(path, start) for path, start in zip(block.paths, block.start, strict=True)])
    return torch.where(outcome.fine(i), torch.where(dead, new.to(q), scaled), block.start)


def left_over(
    block: Block, p: Tensor, came: Tensor, i: int, outcome: Outcome, share: Share, old: list[Tensor]
) -> list[Tensor]:
    """What is owed then of each matrix: M - P Q, with `came`, what the others have had of this rank's Q."""
    kept = _stack([error.reshape(block.shape).to(p) for error in old])
    base = kept if block.sent is None else block.sent
    if share.known is None:
        base = torch.where(share.sends, base, kept)
    elif share.known and outcome.whole and plain([base]):  # `base` is what `owed` has made: nobody else's
        return [*base.baddbmm_(p.mT, came, alpha=-1.0).unbind(0)]
    new = torch.baddbmm(base, p.mT, came, alpha=-1.0)
    return [*(new if outcome.whole else torch.where(outcome.fine(i), new, kept)).unbind(0)]
