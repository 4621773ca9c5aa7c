"""Sums of matrices over ranks that travel as two thin factors.

A matrix M of rows x columns is summed as P Q, where the rows of P^T, as many as the rank, are orthonormal. Factors are stored
with the rank first, P^T as (rank, rows) and Q as (rank, columns): their products with a matrix are several times faster so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .._tree import plain
from ..axes._collectives import axis_size, psum
from ..axes._primitive import AxisName
from ._codec import Codec
from ._noise import places_of
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
        """What it is to send of a leaf, factor * gradient + error; None for nothing. In new memory, where there is an error
        and the factor is known and not 0."""
        grad, error = as_dtype(grad, dtype), None if error is None else as_dtype(error, dtype)
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
    leaf: str  # a path of the bucket, for dice

    def __call__(self, name: str, parts: list[Tensor], words: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sums of all parts, flat, those of the words, and what this rank's message, of this name, has lost of the parts."""
        flat = [part.reshape(-1) for part in parts]
        if self.wire is None:
            if not parts and not words.numel():
                return words, words, None
            summed = psum(torch.cat([*flat, words]), self.axis)
            n = summed.numel() - words.numel()
            return summed[:n], summed[n:], None
        joined = torch.cat(flat) if flat else words.new_zeros(0, dtype=torch.float32)
        if not parts and not words.numel():
            return joined, words, None
        one = words.new_ones(())
        places = places_of({f"{name} of {self.leaf}": joined}, joined.device) if self.wire.noisy else None
        reduced = coded_mean(self.wire, joined, one, words, self.axis, one if self.feeds else None, places)
        return reduced.mean * axis_size(self.axis), reduced.words, reduced.lost


def cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """A flat tensor as the tensors of which it consists; views."""
    pieces = flat.split([shape.numel() for shape in shapes]) if shapes else ()
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


class Block(NamedTuple):
    """Matrices of one shape: on a CPU one, since a batch of several would be a copy and gain nothing there."""

    paths: tuple[str, ...]
    shape: tuple[int, int]  # rows, columns
    sent: Tensor | None  # what this rank sends, (matrices, rows, columns); None for nothing
    start: Tensor  # (matrices, rank, columns)
    part: Tensor  # this rank's part of P^T = Q M^T, (matrices, rank, rows)


def blocks_of(
    leaves: Mapping[str, Tensor], q: Mapping[str, Tensor], owed: Callable[[str], Tensor | None], dtype: torch.dtype
) -> list[Block]:
    """The matrices that `q` has a factor for, cut into blocks; `owed`: path -> what this rank sends."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, start in q.items():
        alone = path if leaves[path].device.type == "cpu" else None
        groups.setdefault((leaves[path].shape[0], *start.shape, alone), []).append(path)
    made = []
    for paths in groups.values():
        rows, columns = leaves[paths[0]].shape[0], q[paths[0]].shape[1]
        start = stack([as_dtype(q[path], dtype) for path in paths])
        sent = [s.reshape(rows, columns) for s in map(owed, paths) if s is not None]
        # Multiplied at once, while it is in the cache.
        given = stack(sent) if sent else None
        part = start.new_zeros(*start.shape[:2], rows) if given is None else torch.bmm(start, given.mT)
        made.append(Block(tuple(paths), (rows, columns), given, start, part))
    return made


def stack(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def right(block: Block, p: Tensor) -> Tensor:
    """This rank's part of Q = P^T M: (matrices, rank, columns)."""
    return torch.zeros_like(block.start) if block.sent is None else torch.bmm(p, block.sent)


def left_over(block: Block, p: Tensor, own: Tensor, share: Share, old: list[Tensor]) -> Tensor:
    """What this rank owes after this step, M - P Q, (matrices, rows, columns)."""
    if share.known and block.sent is not None and plain([block.sent]):
        return block.sent.baddbmm_(p.mT, own, alpha=-1.0)  # nobody else's: see `Share.owed`
    base = block.sent
    if base is None or share.known is None:
        kept = stack([as_dtype(error, p.dtype).reshape(block.shape) for error in old])
        base = kept if base is None else torch.where(share.sends, base, kept)
    return torch.baddbmm(base, p.mT, own, alpha=-1.0)


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
    scales = [torch.linalg.vector_norm(q, math.inf, dim=2, keepdim=True) for q in qs]
    live = counted != 0
    told = torch.cat([scale.view(-1) for scale in scales]) if scales else counted.view(1)
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
    new = stack([fresh(path, start) for path, start in zip(block.paths, block.start, strict=True)])
    return torch.where(outcome.fine(i), torch.where(dead, new.to(q), scaled), block.start)
