"""A mean in which some leaves are sent as two thin factors: the common part of both PowerSGDs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import psum
from ..base import AxisName, Call, Share, record_words, trees
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


_LINE = 64  # bytes


def _blocks(leaves: Mapping[str, Tensor], q: Mapping[str, Tensor], dtype: torch.dtype) -> list[tuple[list[str], bool]]:
    """The paths of matrices of one shape, those of a single matrix last; whether a block is of one for the reason
    below.

    The last bits of a product depend on the position of its factors in a cache line. A matrix's result must not depend
    on the other matrices of the bucket. So on a CPU, matrices whose factors end inside a cache line are blocks of one.
    """
    groups: dict[tuple[int, int, int], list[str]] = {}
    for path, start in q.items():
        groups.setdefault((leaves[path].shape[0], start.shape[0], start.shape[1]), []).append(path)
    together, single = list[tuple[list[str], bool]](), list[tuple[list[str], bool]]()
    for (rows, rank, columns), paths in groups.items():
        sizes = rows * columns, rows * rank, rank * columns
        if leaves[paths[0]].device.type == "cpu" and any(size * dtype.itemsize % _LINE for size in sizes):
            single += [([path], True) for path in paths]
        else:
            together.append((paths, False))
    return together + single


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


class LowRankMeans(NamedTuple):
    means: dict[str, Tensor]  # path -> mean, in the leaf's shape and dtype
    errors: dict[str, Tensor]  # path -> new residual, for the paths of the given residuals
    q: dict[str, Tensor]  # path -> the Q that the next call starts from


class _Sent(NamedTuple):
    """What the ranks have sent in two sums: all by path, but the blocks of matrices that have one shape."""

    blocks: list[tuple[list[str], bool]]  # the paths of a block, and whether it is one matrix
    starts: dict[str, Tensor]  # the Q from which the call starts, (rank, columns)
    terms: dict[str, Tensor]  # this rank's matrix, (rows, columns)
    p_t: dict[str, Tensor]  # the orthonormal P of all ranks, transposed, (rank, rows)
    own: dict[str, Tensor]  # this rank's term of Q
    totals: list[Tensor]  # by block, the sums of Q, (matrices, rank, columns)
    lost: dict[str, Tensor]  # the encoding error of this rank's term of Q; empty without a codec
    # Shapes of leaves sent whole; their sum, flat; its encoding error.
    others: tuple[dict[str, torch.Size], Tensor, Tensor | None]


def _send_factors(
    leaves: Mapping[str, Tensor], q: Mapping[str, Tensor], axis: AxisName, epsilon: float, share: Share, call: Call,
    errors: Mapping[str, Tensor], dtype: torch.dtype,
) -> _Sent:  # fmt: skip
    """Send P = M Q, and then Q = M^T P of the orthonormal P, of all matrices together; see `low_rank_mean`."""
    wire = call.wire

    def term(path: str) -> Tensor:
        """This rank's term of the mean."""
        return share.times(leaves[path].to(dtype), errors.get(path))

    def exchange(name: str, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The sum of parts over the ranks, and the encoding error of this rank's message."""
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0, dtype=dtype)
        if not flat.numel() or wire is None:
            return psum(flat, axis) if flat.numel() else flat, None
        keyed = {f"{name} of {next(iter(leaves), '')}": flat}
        return coded_sum(axis, wire, flat, places_of(keyed, flat.device) if wire.stochastic else None, bool(errors))

    blocks = _blocks(leaves, q, dtype)
    starts = {path: q[path].to(dtype) for paths, _ in blocks for path in paths}
    terms, parts = dict[str, Tensor](), list[Tensor]()
    for path, start in starts.items():
        terms[path] = term(path).reshape(-1, start.shape[1])
        parts.append(torch.mm(start, terms[path].T))  # now, while the term is in the cache
    others = {path: leaf.shape for path, leaf in leaves.items() if path not in q and leaf.numel()}
    # P^T = Q M^T of each matrix, (rank, rows), then Q = P^T M, (rank, columns).
    first, lost = exchange("P", [*parts, *map(term, others)])
    lefts = [torch.Size((len(paths), len(starts[paths[0]]), len(terms[paths[0]]))) for paths, _ in blocks]
    rights = [torch.Size((len(paths), *starts[paths[0]].shape)) for paths, _ in blocks]
    size = sum(shape.numel() for shape in lefts)
    bases = [one for p in _cut(first[:size], lefts) for one in orthonormal(p, epsilon).unbind(0)]
    p_t = dict(zip(starts, bases, strict=True))
    own = {path: torch.mm(p_t[path], terms[path]) for path in starts}
    second, missed = exchange("Q", list(own.values()))
    totals = _cut(second, rights)
    q_lost = dict[str, Tensor]()  # the encoding error of each Q
    if missed is not None:
        q_lost = dict(zip(starts, [one for e in _cut(missed, rights) for one in e.unbind(0)], strict=True))

    whole = others, first[size:], lost if lost is None else lost[size:]
    return _Sent(blocks, starts, terms, p_t, own, totals, q_lost, whole)


def low_rank_mean(
    leaves: Mapping[str, Tensor],
    q: Mapping[str, Tensor],
    axis: AxisName,
    epsilon: float,
    share: Share,
    call: Call,
    errors: Mapping[str, Tensor],
    fresh: Callable[[str, Tensor], Tensor],
) -> LowRankMeans:
    """The mean of leaves; those with a factor in `q` are sent as two factors.

    Where no rank has weight, or the sum of a matrix is 0 or not finite, its Q and its residual stay as they are.

    Args:
        q: Path -> the Q to start from.
        call: Of it, `wire` and `donated` are used; if donated, the means may take the gradients' memory.
        errors: Path -> residual.
        fresh: (path, a Q) -> random numbers in place of its rows that have become 0.
    """
    coded = call.wire is not None
    dtype = torch.float32 if coded else record_words.words_dtype(leaf.dtype for leaf in leaves.values())
    # Leaves that are summed uncompressed and unencoded have no residual.
    errors = {path: e.to(dtype) for path, e in errors.items() if coded or path in q}
    sent = _send_factors(leaves, q, axis, epsilon, share, call, errors, dtype)
    blocks, starts, terms, p_t, own, totals, q_lost, (others, flat, lost) = sent

    scales = [torch.linalg.vector_norm(total, math.inf, dim=2, keepdim=True) for total in totals]
    joined = torch.cat([scale.view(-1) for scale in scales]) if scales else None
    whole = False  # known on the host: some rank has weight, everything is finite, and no row is 0
    if joined is not None and isinstance(share.any_live, bool) and trees.readable_without_sync(joined):
        whole = share.any_live and bool((joined > 0).all() & torch.isfinite(joined).all())
    reuses = call.donated and trees.plain(list(leaves.values()))
    made = LowRankMeans(dict(zip(others, _cut(flat, list(others.values())), strict=True)), {}, {})
    for (paths, alone), total, scale in zip(blocks, totals, scales, strict=True):
        fine = torch.isfinite(scale).all(dim=1, keepdim=True) & share.any_live_on(scale.device)
        fine = fine & (scale != 0).any(dim=1, keepdim=True)
        if whole:
            new = total / scale
        else:
            drawn = torch.stack([fresh(path, starts[path]) for path in paths]).to(total)
            new = torch.where(scale == 0, drawn, total / torch.where(scale == 0, torch.ones_like(scale), scale))
            new = torch.where(fine, new, torch.stack([starts[path] for path in paths]))
        made.q.update(zip(paths, new.unbind(0), strict=True))
        # A block of one is multiplied at a position of its own in a cache line.
        for j, (path, factor) in enumerate(zip(paths, (total.clone() if alone else total).unbind(0), strict=True)):
            leaf, p = leaves[path], p_t[path].T
            # This takes half the time of `mm`: writing zeros brings the memory into the cache.
            fits = reuses and leaf.dtype is dtype and leaf.is_contiguous()
            zeros = leaf.view(len(leaf), -1).zero_() if fits else p.new_zeros(len(p), factor.shape[1])
            if path in errors:
                # The term is new memory, as a sum. Transposed, which takes three quarters of the time.
                error = _added(terms[path].T, own[path].T, p.T, -1.0).T
                error = _added(error, p, q_lost[path]) if q_lost else error
                kept = errors[path].reshape(error.shape)
                made.errors[path] = error if whole else torch.where(fine[j], error, kept)
            made.means[path] = zeros.addmm_(p, factor)
    if lost is not None:
        for path, error in zip(others, _cut(lost, list(others.values())), strict=True):
            if path in errors:
                made.errors[path] = choose(usable(share, made.means[path]), error, errors[path])
    return LowRankMeans(
        {p: made.means[p].view(x.shape).to(x.dtype) if p in made.means else x for p, x in leaves.items()},
        {path: new.reshape(errors[path].shape) for path, new in made.errors.items()},
        {path: new.to(q[path].dtype) for path, new in made.q.items()},
    )


def _added(x: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """x + alpha a b, in the memory of `x` where that may be."""
    return (x.addmm_ if trees.plain(x) else x.addmm)(a, b, alpha=alpha)
