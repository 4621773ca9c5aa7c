"""Sums of matrices over ranks that travel as two thin factors.

A matrix M of rows x columns is summed as P Q, where the rows of P^T, as many as the rank, are orthonormal. Factors are stored
with the rank first, P^T as (rank, rows) and Q as (rank, columns): their products with a matrix are several times faster so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .._axis_env import AxisName
from .._tree import plain, readable_without_sync
from ..axes._collectives import axis_size, psum
from ..codecs._codec import Codec
from ..codecs._random_bits import Noise, key_of, places_of
from ..reductions._coded_mean import coded_mean


def draw(seed: int, name: str, step: int, rank: int, columns: int, like: Tensor) -> Tensor:
    """(rank, columns) numbers in (-1, 1), float64 where `like` is so, else float32: a hash of its arguments, on its device.

    >>> draw(0, "w", 0, 1, 3, torch.zeros(())).shape
    torch.Size([1, 3])
    """
    key = key_of((seed, step), device=like.device)
    unit = Noise(places_of({name: like.new_empty(rank, columns)}, like.device), key, key).uniform()
    # In the middle of its steps of 2**-23, so never 0.
    return (2 * unit - (1 - 2**-24)).to(torch.promote_types(like.dtype, torch.float32)).view(rank, columns)


class Owing(NamedTuple):
    """A `Share` of a rank that may owe something."""

    factor: Tensor
    known: float | None
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
        positions = places_of({f"{name} of {self.leaf}": joined}, joined.device) if self.wire.stochastic else None
        reduced = coded_mean(self.wire, joined, one, words, self.axis, one if self.feeds else None, positions)
        return reduced.mean * axis_size(self.axis), reduced.words, reduced.lost


def cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """A flat tensor as the tensors of which it consists; views."""
    pieces = flat.split([shape.numel() for shape in shapes]) if shapes else ()
    return [p if len(shape) == 1 else p.view(shape) for p, shape in zip(pieces, shapes, strict=True)]


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def shaped(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape == like.shape else x.view(like.shape)


class Block(NamedTuple):
    """Matrices of one shape.

    A product's last bits depend on where in a cache line its factors begin. So on a CPU, where a matrix's result shall not
    depend on what stands beside it, matrices whose factors end inside a cache line are blocks of one.
    """

    paths: list[str]
    start: list[Tensor]  # of each (rank, columns)
    sent: list[Tensor] | None  # of each what this rank sends, (rows, columns); None for nothing
    parts: list[Tensor]  # of each this rank's part of P^T = Q M^T, (rank, rows)
    alone: bool

    @property
    def sizes(self) -> tuple[torch.Size, torch.Size]:
        """Of all P^T, and of all Q: (matrices, rank, rows), (matrices, rank, columns)."""
        n = len(self.paths)
        return torch.Size((n, *self.parts[0].shape)), torch.Size((n, *self.start[0].shape))


_LINE = 64  # bytes


def blocks_of(
    leaves: Mapping[str, Tensor], q: Mapping[str, Tensor], owed: Callable[[str], Tensor | None], dtype: torch.dtype
) -> list[Block]:
    """The matrices that `q` has a factor for, those of one alone last; `owed`: path -> what this rank sends."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for path, start in q.items():
        groups.setdefault((leaves[path].shape[0], start.shape[0], start.shape[1]), []).append(path)
    together, single = [], []
    for (rows, rank, columns), paths in groups.items():
        sizes = rows * columns, rows * rank, rank * columns
        if leaves[paths[0]].device.type == "cpu" and any(size * dtype.itemsize % _LINE for size in sizes):
            single += [([path], True) for path in paths]
        else:
            together.append((paths, False))
    made = []
    for paths, alone in together + single:
        starts = [as_dtype(q[path], dtype) for path in paths]
        rows = leaves[paths[0]].shape[0]
        sent: list[Tensor] = []
        parts: list[Tensor] = []
        for path, first in zip(paths, starts, strict=True):
            if (given := owed(path)) is not None:
                sent.append(given if given.dim() == 2 else given.reshape(rows, first.shape[1]))
                parts.append(torch.mm(first, sent[-1].T))  # at once, while it is in the cache
            else:
                parts.append(first.new_zeros(first.shape[0], rows))
        made.append(Block(paths, starts, sent or None, parts, alone))
    return made


def right(block: Block, p: Tensor, share: Owing, old: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of each matrix this rank's part of Q = P^T M, (rank, columns); and of those in `old`, the errors, what this rank owes
    after this step: M - P Q."""
    own: list[Tensor] = []
    owes: dict[str, Tensor] = {}
    for i, (path, p_t) in enumerate(zip(block.paths, p.unbind(0), strict=True)):
        sent = None if block.sent is None else block.sent[i]
        own.append(torch.zeros_like(block.start[i]) if sent is None else torch.mm(p_t, sent))
        if path not in old:
            continue
        if sent is not None and share.known and plain([sent]):
            # Nobody else's: see `Owing.owed`. Transposed, which takes three quarters of the time.
            owes[path] = sent.T.addmm_(own[i].T, p_t, alpha=-1.0).T
            continue
        kept = as_dtype(old[path], p.dtype).reshape(p.shape[2], -1)
        base = kept if sent is None else sent if share.known is not None else torch.where(share.sends, sent, kept)
        owes[path] = torch.addmm(base, p_t.T, own[i], alpha=-1.0)
    return own, owes


def products(
    blocks: list[Block], p: list[Tensor], q: list[Tensor], positions: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """By path the matrices P Q, of blocks' P^T and Q; where there is a place for one, it is written there."""
    made: dict[str, Tensor] = {}
    for block, p_t, factor in zip(blocks, p, q, strict=True):
        if block.alone:
            factor = factor.clone()  # which begins anywhere
        for path, p_t_one, factor_one in zip(block.paths, p_t.unbind(0), factor.unbind(0), strict=True):
            # In half the time of `mm`: zeros bring the place into the cache.
            place = positions.get(path)
            zeros = p_t_one.new_zeros(p_t_one.shape[1], factor_one.shape[1]) if place is None else place.zero_()
            made[path] = zeros.addmm_(p_t_one.T, factor_one)
    return made


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
    if readable_without_sync(told) and readable_without_sync(counted):
        whole = bool(live & (told > 0).all() & torch.isfinite(told).all())
    return Outcome(scales, live, whole)


def next_start(block: Block, q: Tensor, i: int, outcome: Outcome, fresh: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The factors that the next step starts from: this step's, with new rows in the place of those that are 0."""
    scale = outcome.scales[i]
    if outcome.whole:
        return q / scale
    dead = scale == 0
    scaled = q / torch.where(dead, torch.ones_like(scale), scale)
    new = torch.stack([fresh(path, start) for path, start in zip(block.paths, block.start, strict=True)])
    return torch.where(outcome.fine(i), torch.where(dead, new.to(q), scaled), torch.stack(block.start))
