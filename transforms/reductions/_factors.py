"""A mean in which some leaves are sent as two thin factors: the common part of both PowerSGDs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import psum
from ..base import AxisName, Call, Share, plain, readable_without_sync, words_dtype
from ..codecs import Noise, key_of, places_of
from ._mean import choose, coded_sum, usable


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


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """The tensors of these shapes in a flat tensor; views."""
    pieces = flat.split([shape.numel() for shape in shapes]) if shapes else ()
    return [p if len(shape) == 1 else p.view(shape) for p, shape in zip(pieces, shapes, strict=True)]


class Block(NamedTuple):
    """Matrices of one shape.

    The last bits of a product depend on the position of its factors in a cache line. A matrix's result must not depend
    on the other matrices of the bucket. So on a CPU, matrices whose factors end inside a cache line are blocks of one.
    """

    paths: list[str]
    start: list[Tensor]  # Q of each matrix, (rank, columns)
    sent: list[Tensor]  # this rank's term of the mean of each matrix, (rows, columns)
    parts: list[Tensor]  # this rank's part of P^T = Q M^T of each matrix, (rank, rows)
    alone: bool  # whether it is a block of one for the reason above

    @property
    def sizes(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of all P^T and of all Q: (matrices, rank, rows), (matrices, rank, columns)."""
        n = len(self.paths)
        return torch.Size((n, *self.parts[0].shape)), torch.Size((n, *self.start[0].shape))


_LINE = 64  # bytes


def blocks_of(
    leaves: Mapping[str, Tensor], q: Mapping[str, Tensor], term: Callable[[str], Tensor], dtype: torch.dtype
) -> list[Block]:
    """The matrices with a factor in `q`, blocks of one last; `term`: path -> this rank's term of the mean."""
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
        starts, sent, parts = [q[path].to(dtype) for path in paths], list[Tensor](), list[Tensor]()
        for path, first in zip(paths, starts, strict=True):
            own = term(path)
            sent.append(own if own.dim() == 2 else own.reshape(-1, first.shape[1]))
            parts.append(torch.mm(first, sent[-1].T))  # now, while the term is in the cache
        made.append(Block(paths, starts, sent, parts, alone))
    return made


def compute_q(block: Block, p: Tensor, feeds: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's part of Q = P^T M of each matrix, (rank, columns), and M - P Q for the paths in `feeds`."""
    own: list[Tensor] = []
    left: dict[str, Tensor] = {}
    for path, p_t, sent in zip(block.paths, p.unbind(0), block.sent, strict=True):
        own.append(torch.mm(p_t, sent))
        if path in feeds:  # the term is new memory, as a sum
            # Transposed, which takes three quarters of the time.
            rest = sent.T.addmm_ if plain(sent) else sent.T.addmm
            left[path] = rest(own[-1].T, p_t, alpha=-1.0).T
    return own, left


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


class Reduced(NamedTuple):
    means: dict[str, Tensor]  # path -> mean, in the leaf's shape and dtype
    errors: dict[str, Tensor]  # path -> new residual, for the paths of the given residuals
    q: dict[str, Tensor]  # path -> the Q that the next call starts from


def low_rank_mean(
    leaves: Mapping[str, Tensor],
    q: Mapping[str, Tensor],
    axis: AxisName,
    epsilon: float,
    share: Share,
    call: Call,
    errors: Mapping[str, Tensor],
    fresh: Callable[[str, Tensor], Tensor],
) -> Reduced:
    """The mean of leaves; those with a factor in `q` are sent as two factors.

    Args:
        q: Path -> the Q to start from.
        call: Of it, `wire` and `donated` are used; if donated, the means may take the gradients' memory.
        errors: Path -> residual.
        fresh: (path, a Q) -> random numbers in place of its rows that have become 0.
    """
    wire, coded = call.wire, call.wire is not None
    dtype = torch.float32 if coded else words_dtype(leaf.dtype for leaf in leaves.values())
    # Leaves that are summed uncompressed and unencoded have no residual.
    errors = {path: e.to(dtype) for path, e in errors.items() if coded or path in q}

    def term(path: str) -> Tensor:
        return share.times(leaves[path].to(dtype), errors.get(path))

    def exchange(name: str, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The sum of parts over the ranks, and the encoding error of this rank's message."""
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0, dtype=dtype)
        if not flat.numel() or wire is None:
            return psum(flat, axis) if flat.numel() else flat, None
        keyed = {f"{name} of {next(iter(leaves), '')}": flat}
        return coded_sum(axis, wire, flat, places_of(keyed, flat.device) if wire.stochastic else None, bool(errors))

    blocks = blocks_of(leaves, q, term, dtype)
    others = {path: leaf.shape for path, leaf in leaves.items() if path not in q and leaf.numel()}
    first, lost = exchange("P", [*(part for block in blocks for part in block.parts), *map(term, others)])
    left_sizes, right_sizes = [block.sizes[0] for block in blocks], [block.sizes[1] for block in blocks]
    size = sum(shape.numel() for shape in left_sizes)
    p_t = [orthonormal(p, epsilon) for p in _cut(first[:size], left_sizes)]
    own, residuals = list[Tensor](), dict[str, Tensor]()
    for block, p in zip(blocks, p_t, strict=True):
        some, left = compute_q(block, p, errors)
        own += some
        residuals |= left
    second, missed = exchange("Q", own)
    totals = _cut(second, right_sizes)

    outputs: dict[str, Tensor] = {}
    if call.donated and plain(list(leaves.values())):
        matrices = {path: leaves[path] for path in q}
        outputs = {path: m.view(len(m), -1) for path, m in matrices.items() if m.dtype is dtype and m.is_contiguous()}
    means = products(blocks, p_t, totals, outputs)
    means.update(zip(others, _cut(first[size:], list(others.values())), strict=True))
    left_out = None if missed is None else _cut(missed, right_sizes)
    made = _next(blocks, p_t, totals, left_out, share, residuals, errors, fresh)
    if lost is not None:
        for path, error in zip(others, _cut(lost[size:], list(others.values())), strict=True):
            if path in errors:
                made.errors[path] = choose(usable(share, means[path]), error, errors[path])
    return Reduced(
        {p: means[p].view(x.shape).to(x.dtype) if p in means else x for p, x in leaves.items()},
        {path: new.reshape(errors[path].shape) for path, new in made.errors.items()},
        {path: new.to(q[path].dtype) for path, new in made.q.items()},
    )


def _next(
    blocks: list[Block],
    p: list[Tensor],
    totals: list[Tensor],
    missed: list[Tensor] | None,
    share: Share,
    residuals: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
    fresh: Callable[[str, Tensor], Tensor],
) -> Reduced:
    """The next Q of each matrix, with new rows in place of those that are 0, and the residuals.

    Where no rank has weight, or the sum of a matrix is 0 or not finite, both stay as they are.

    Args:
        missed: The encoding error of each block's Q; None where it is not encoded.
    """
    made = Reduced({}, {}, {})
    scales = [torch.linalg.vector_norm(q, math.inf, dim=2, keepdim=True) for q in totals]
    whole = False  # known on the host: some rank has weight, everything is finite, and no row is 0
    if (
        scales
        and isinstance(share.alive, bool)
        and readable_without_sync(joined := torch.cat([s.view(-1) for s in scales]))
    ):
        whole = share.alive and bool((joined > 0).all() & torch.isfinite(joined).all())
    for i, (block, q, scale) in enumerate(zip(blocks, totals, scales, strict=True)):
        fine = torch.isfinite(scale).all(dim=1, keepdim=True) & share.is_alive(scale.device)
        fine = fine & (scale != 0).any(dim=1, keepdim=True)
        if whole:
            new = q / scale
        else:
            dead = scale == 0
            drawn = torch.stack([fresh(path, start) for path, start in zip(block.paths, block.start, strict=True)])
            new = torch.where(dead, drawn.to(q), q / torch.where(dead, torch.ones_like(scale), scale))
            new = torch.where(fine, new, torch.stack(block.start))
        made.q.update(zip(block.paths, new.unbind(0), strict=True))
        for j, path in enumerate(block.paths):
            if path not in residuals:
                continue
            error = residuals[path]
            if missed is not None:
                error = (error.addmm_ if plain(error) else error.addmm)(p[i][j].T, missed[i][j])
            made.errors[path] = error if whole else torch.where(fine[j], error, old[path].reshape(error.shape))
    return made
