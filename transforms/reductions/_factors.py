"""Matrices as products of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import axis_size, psum
from ..base import AxisName, plain, readable_without_sync
from ..codecs import Codec, Noise, key_of, places_of
from ._coded_sum import Term, coded_mean


def draw(seed: int, name: str, step: int, rank: int, columns: int, like: Tensor) -> Tensor:
    """Random numbers in (-1, 1), (rank, columns): a hash of the arguments.

    They are float64 where `like` is, float32 otherwise, and lie on the device of `like`.

    >>> draw(0, "w", 0, 1, 3, torch.zeros(())).shape
    torch.Size([1, 3])
    """
    key = key_of((seed, step), device=like.device)
    unit = Noise(places_of({name: like.new_empty(rank, columns)}, like.device), key, key).uniform()
    # In the middle of steps of 2**-23, so never 0.
    return (2 * unit - (1 - 2**-24)).to(torch.promote_types(like.dtype, torch.float32)).view(rank, columns)


class FeedbackWeight(NamedTuple):
    """A `RankWeight` of a rank that may have residuals."""

    factor: Tensor
    known: float | None
    flush: bool  # whether it sends its residuals where the factor is 0

    def message(self, grad: Tensor, error: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The message of a leaf, factor * gradient + residual; None for no message.

        It is in new memory where there is a residual and the factor is known and not 0.
        """
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
    """Sums floats and the words of the lane over the ranks."""

    axis: AxisName
    wire: Codec | None  # the codec of the floats; with a codec the words are float64
    feeds: bool  # whether the encoding errors of `wire` are needed
    leaf: str  # a path of the bucket, which keys random bits

    def __call__(self, name: str, parts: list[Tensor], words: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sums of the parts, the sums of the words, and the encoding error of this rank's message `name`, flat."""
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
        term = Term(self.wire, joined, one, words, one if self.feeds else None, positions)
        reduced = coded_mean(term, self.axis)
        return reduced.mean * axis_size(self.axis), reduced.words, reduced.lost


def cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """The tensors of these shapes in a flat tensor; views."""
    pieces = flat.split([shape.numel() for shape in shapes]) if shapes else ()
    return [p if len(shape) == 1 else p.view(shape) for p, shape in zip(pieces, shapes, strict=True)]


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def shaped(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape == like.shape else x.view(like.shape)


class Block(NamedTuple):
    """Matrices of one shape.

    The last bits of a product depend on the position of its factors in a cache line. A matrix's result must not depend
    on the other matrices of the bucket. So on a CPU, matrices whose factors end inside a cache line are blocks of one.
    """

    paths: list[str]
    start: list[Tensor]  # Q of each matrix, (rank, columns)
    sent: list[Tensor] | None  # this rank's message of each matrix, (rows, columns); None for no message
    parts: list[Tensor]  # this rank's part of P^T = Q M^T of each matrix, (rank, rows)
    alone: bool  # whether it is a block of one for the reason above

    @property
    def sizes(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of all P^T and of all Q: (matrices, rank, rows), (matrices, rank, columns)."""
        n = len(self.paths)
        return torch.Size((n, *self.parts[0].shape)), torch.Size((n, *self.start[0].shape))


_LINE = 64  # bytes


def blocks_of(
    leaves: Mapping[str, Tensor], q: Mapping[str, Tensor], message: Callable[[str], Tensor | None], dtype: torch.dtype
) -> list[Block]:
    """The matrices with a factor in `q`, blocks of one last; `message`: path -> this rank's message."""
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
            if (given := message(path)) is not None:
                sent.append(given if given.dim() == 2 else given.reshape(rows, first.shape[1]))
                parts.append(torch.mm(first, sent[-1].T))  # now, while the message is in the cache
            else:
                parts.append(first.new_zeros(first.shape[0], rows))
        made.append(Block(paths, starts, sent or None, parts, alone))
    return made


def compute_q(
    block: Block, p: Tensor, share: FeedbackWeight, old: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's part of Q = P^T M of each matrix, (rank, columns), and the new residuals M - P Q.

    Residuals are computed for the matrices in `old`.

    Args:
        old: Path -> old residual.
    """
    own: list[Tensor] = []
    residuals: dict[str, Tensor] = {}
    for i, (path, p_t) in enumerate(zip(block.paths, p.unbind(0), strict=True)):
        sent = None if block.sent is None else block.sent[i]
        own.append(torch.zeros_like(block.start[i]) if sent is None else torch.mm(p_t, sent))
        if path not in old:
            continue
        if sent is not None and share.known and plain([sent]):
            # In place: `FeedbackWeight.message` made new memory. Transposed, which takes three quarters of the time.
            residuals[path] = sent.T.addmm_(own[i].T, p_t, alpha=-1.0).T
            continue
        kept = as_dtype(old[path], p.dtype).reshape(p.shape[2], -1)
        base = kept if sent is None else sent if share.known is not None else torch.where(share.sends, sent, kept)
        residuals[path] = torch.addmm(base, p_t.T, own[i], alpha=-1.0)
    return own, residuals


def products(blocks: list[Block], p: list[Tensor], q: list[Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Path -> the matrix P Q, from the P^T and Q of blocks.

    Args:
        outputs: Path -> a matrix to write the result to.
    """
    made: dict[str, Tensor] = {}
    for block, p_t, factor in zip(blocks, p, q, strict=True):
        if block.alone:
            factor = factor.clone()  # at a position of its own in a cache line
        for path, p_t_one, factor_one in zip(block.paths, p_t.unbind(0), factor.unbind(0), strict=True):
            # This takes half the time of `mm`: writing zeros brings the memory into the cache.
            output = outputs.get(path)
            zeros = p_t_one.new_zeros(p_t_one.shape[1], factor_one.shape[1]) if output is None else output.zero_()
            made[path] = zeros.addmm_(p_t_one.T, factor_one)
    return made


def orthonormal(p: Tensor, epsilon: float) -> Tensor:
    """Orthonormal rows with the same span, (matrices, rank, rows); dependent rows are completed with other directions.

    It uses Householder QR. That was the fastest method that is safe for nearly dependent rows and scales values before
    it squares them.
    """
    u, r = torch.linalg.qr(p.mT)
    u = u.mT
    if epsilon:
        size = torch.diagonal(r, dim1=-2, dim2=-1).abs().unsqueeze(-1)
        u = u * (size / (size + epsilon))
    return u


class Finiteness(NamedTuple):
    """Which summed factors are usable as they are."""

    scales: list[Tensor]  # the largest absolute values of the rows of each block's Q, (matrices, rank, 1)
    live: Tensor  # 0-d bool: some rank has weight
    whole: bool  # known on the host: some rank has weight, everything is finite, and no row is 0

    def fine(self, i: int) -> Tensor:
        """Whether the sum of each matrix of a block is used, (matrices, 1, 1)."""
        return self.live & torch.isfinite(self.scales[i]).all(dim=1, keepdim=True)


def check_finite(qs: list[Tensor], counted: Tensor) -> Finiteness:
    scales = [torch.linalg.vector_norm(q, math.inf, dim=2, keepdim=True) for q in qs]
    live = counted != 0
    joined = torch.cat([scale.view(-1) for scale in scales]) if scales else counted.view(1)
    whole = False
    if readable_without_sync(joined) and readable_without_sync(counted):
        whole = bool(live & (joined > 0).all() & torch.isfinite(joined).all())
    return Finiteness(scales, live, whole)


def next_start(block: Block, q: Tensor, i: int, finite: Finiteness, fresh: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The factors that the next step starts from: this step's Q, with new rows in place of rows that are 0."""
    scale = finite.scales[i]
    if finite.whole:
        return q / scale
    dead = scale == 0
    scaled = q / torch.where(dead, torch.ones_like(scale), scale)
    new = torch.stack([fresh(path, start) for path, start in zip(block.paths, block.start, strict=True)])
    return torch.where(finite.fine(i), torch.where(dead, new.to(q), scaled), torch.stack(block.start))


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
