"""The pieces of buckets that ranks own, their merge for other numbers of ranks, and those bound in a call."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..axes import axis_index, axis_size
from ..base import Merge, Tree, trees
from ._buckets import ALIGN_BYTES, Bucket, make_layout, views

if TYPE_CHECKING:
    from ..optimizers import Optimizer


class Slice(NamedTuple):
    """This rank's slice of a flattened leaf, or of its optimizer state."""

    shape: torch.Size  # of the whole
    start: int
    stop: int  # 0 if this rank holds nothing
    whole: bool  # whether one rank has it as a whole, in its own shape
    holds: bool  # whether this rank writes it; of a value without elements one rank does


@dataclass(frozen=True, eq=False)
class Pieces:
    """Buckets that are cut into one piece for each rank of an axis.

    Bucket k is cut at `bounds[k]`, ranks + 1 positions in elements; the piece of rank r is
    [bounds[k][r], bounds[k][r + 1]). Of a leaf, a rank owns the slice that lies in its piece: flat, in logical order,
    and empty where none does. Leaves in `whole` are never cut: they have their own shape on one rank, (1,) where that
    has no dims, and a shape of zeros on the others.
    """

    axis: str
    rank: int
    buckets: tuple[Bucket, ...]
    bounds: tuple[tuple[int, ...], ...]
    shapes: Mapping[str, torch.Size]
    whole: frozenset[str]

    @property
    def ranks(self) -> int:
        return len(self.bounds[0]) - 1 if self.bounds else 1

    def sizes(self, k: int) -> tuple[int, ...]:
        """The number of elements of each rank's piece of a bucket, padding included."""
        return tuple(stop - start for start, stop in zip(self.bounds[k], self.bounds[k][1:], strict=False))

    @functools.cached_property
    def slices(self) -> dict[str, tuple[int, int]]:
        """Path -> (start, stop), this rank's slice of the flat leaf."""
        return self._slices_of(self.rank)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that differs for other buckets, cuts or numbers of ranks."""
        cuts = [(bucket.paths, bounds) for bucket, bounds in zip(self.buckets, self.bounds, strict=True)]
        return zlib.crc32(repr(cuts).encode())

    @functools.cached_property
    def slices_of_all(self) -> list[dict[str, tuple[int, int]]]:
        """`slices` of each rank."""
        return [self._slices_of(rank) for rank in range(self.ranks)]

    def _slices_of(self, rank: int) -> dict[str, tuple[int, int]]:
        return {path: span for k in range(len(self.buckets)) for path, span in self._slices_in(k, rank).items()}

    def _slices_in(self, k: int, rank: int) -> dict[str, tuple[int, int]]:
        """Path -> (start, stop), a rank's slices of the leaves in one bucket."""
        (low, high), found = self.bounds[k][rank : rank + 2], {}
        for path, at in zip(self.buckets[k].paths, self.buckets[k].offsets, strict=True):
            n = self.shapes[path].numel()
            start, stop = (min(max(x - at, 0), n) for x in (low, high))
            found[path] = (start, stop) if start < stop else (0, 0)
        return found

    def slice_of(self, path: str) -> Slice:
        """This rank's slice of a leaf."""
        shape, (start, stop) = self.shapes[path], self.slices[path]
        holds = bool(stop) or (not shape.numel() and not self.rank)
        return Slice(shape, start, stop, path in self.whole, holds)

    def shape(self, path: str) -> torch.Size:
        """The shape of this rank's slice."""
        start, stop = self.slices[path]
        if path not in self.whole:
            return torch.Size([stop - start])
        whole = self.shapes[path] or torch.Size([1])  # so that a number of no dims is common to all parameters
        return whole if stop - start == whole.numel() and stop else torch.Size([0] * max(len(whole), 1))

    def own(self, tree: Tree) -> Tree:
        """This rank's slices of the leaves, views where the leaves are contiguous."""

        return trees.map_with_path(lambda p, leaf: leaf.reshape(-1)[slice(*self.slices[p])].view(self.shape(p)), tree)

    def only(self, k: int) -> Pieces:
        """The pieces of one bucket."""
        return replace(self, buckets=(self.buckets[k],), bounds=(self.bounds[k],))

    def among(self, paths: Collection[str]) -> Pieces:
        """The pieces of some of the leaves, packed without gaps; their slices are the same."""
        buckets, bounds = [], []
        for k, bucket in enumerate(self.buckets):
            if chosen := tuple(path for path in bucket.paths if path in paths):
                *offsets, numel = itertools.accumulate((self.shapes[path].numel() for path in chosen), initial=0)
                spans = [self._slices_in(k, rank) for rank in range(self.ranks)]
                sizes = [sum(of[path][1] - of[path][0] for path in chosen) for of in spans]
                buckets.append(bucket._replace(paths=chosen, offsets=tuple(offsets), numel=numel))
                bounds.append((0, *itertools.accumulate(sizes)))
        return replace(self, buckets=tuple(buckets), bounds=tuple(bounds))

    def flat(self, k: int, name: str) -> Pieces:
        """The pieces of one bucket as a tree of one flat tensor."""
        bucket = self.buckets[k]._replace(paths=(name,), offsets=(0,))
        shapes = {name: torch.Size([bucket.numel])}
        return replace(self.only(k), buckets=(bucket,), shapes=shapes, whole=frozenset())

    def pack(self, k: int, leaves: Mapping[str, Tensor]) -> Tensor:
        """A bucket's leaves as one flat tensor, with zeros between them."""
        parts = [part.reshape(-1) for part in self.with_padding(k, leaves).values()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def with_padding(self, k: int, leaves: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
        """A bucket's leaves by path, in their order, with zeros of names of their own between them."""
        bucket, found, at = self.buckets[k], OrderedDict[str, Tensor](), 0
        for path, stop in zip(bucket.paths, [*bucket.offsets[1:], bucket.numel], strict=True):
            found[path] = leaves[path]
            at += leaves[path].numel()
            if at < stop:
                found[f"(padding {stop})"] = leaves[path].new_zeros(stop - at)
                at = stop
        return found

    def leaves(self, k: int, flat: Tensor) -> dict[str, Tensor]:
        """Path -> leaf, views of a bucket's flat tensor."""
        return dict(zip(self.buckets[k].paths, views(self.buckets[k], flat, self.shapes), strict=True))

    def pack_own(self, k: int, slices: Mapping[str, Tensor]) -> Tensor:
        """This rank's piece of a bucket, from its slices."""
        parts: list[Tensor] = []
        at = self.bounds[k][self.rank]
        for path, offset in zip(self.buckets[k].paths, self.buckets[k].offsets, strict=True):
            (start, stop), part = self.slices[path], slices[path].reshape(-1)
            if stop:
                if offset + start > at:
                    parts.append(part.new_zeros(offset + start - at))
                parts.append(part)
                at = offset + stop
        rest = slices[self.buckets[k].paths[0]].new_zeros(self.bounds[k][self.rank + 1] - at)
        return parts[0] if len(parts) == 1 and not rest.numel() else torch.cat([*parts, rest])

    def leaves_own(self, k: int, piece: Tensor) -> dict[str, Tensor]:
        """Path -> slice, views of this rank's piece of a bucket."""
        bucket, low, found = self.buckets[k], self.bounds[k][self.rank], {}
        for path, at in zip(bucket.paths, bucket.offsets, strict=True):
            start, stop = self.slices[path]
            begin = max(at + start - low, 0) if stop else 0
            found[path] = piece[begin : begin + stop - start].view(self.shape(path))
        return found


class LocalPieces(Pieces):
    """Pieces of leaves of which a rank has only its own slices."""

    def own(self, tree: Tree) -> Tree:
        return tree


def local_pieces(
    params: Mapping[str, Tensor], axis: str, ranks: int, rank: int, owner: Mapping[str, int] = {}
) -> LocalPieces:
    """The slices along dim 0 that torch's fully_shard gives to ranks, flat.

    Args:
        params: Path -> parameter, of the whole shape.
        owner: Path -> rank, for leaves that only this rank has, whole.
    """
    buckets, bounds = [], []
    for path, p in params.items():
        rows, row = len(p), p.numel() // max(len(p), 1)
        share = -(-rows // ranks)
        ends = [rows * (r >= owner[path]) if path in owner else min((r + 1) * share, rows) for r in range(ranks)]
        buckets.append(Bucket((path,), (0,), p.numel(), p.dtype, p.device, False, ()))
        bounds.append((0, *(end * row for end in ends)))
    shapes = {path: p.shape for path, p in params.items()}
    return LocalPieces(axis, rank, tuple(buckets), tuple(bounds), shapes, frozenset(owner))


def cut(
    params: Mapping[str, Tensor],
    optimizer: Optimizer | None,
    axis: str,
    ranks: int,
    rank: int,
    bucket_bytes: int | None = None,
    direct_bytes: int | None = None,
) -> Pieces:
    """Buckets, and their pieces.

    Elementwise parameters are cut into equal pieces, at multiples of 64 bytes, so that kernels compute the same bits as
    on the whole bucket. Parameters whose optimizer needs the whole leaf have one owner each, balanced by the
    optimizer's cost, and buckets of their own.

    Args:
        params: Path -> tensor, in the order in which the model registered them.
        optimizer: The optimizer; None: all parameters are elementwise, and of one kind.
        axis, ranks, rank: The axis, its size, and this rank's index.
    """
    owner = {} if optimizer is None else owners(params, optimizer, ranks)
    label = (lambda path: 0) if optimizer is None else labels(optimizer)
    buckets = make_layout(params, label, bucket_bytes, direct_bytes, owner)
    shapes = {path: leaf.shape for path, leaf in params.items()}
    bounds = []
    for bucket in buckets:
        if bucket.paths[0] in owner:
            starts = [bisect.bisect_left([owner[path] for path in bucket.paths], r) for r in range(ranks)]
            bounds.append((*((*bucket.offsets, bucket.numel)[at] for at in starts), bucket.numel))
        else:
            align = ALIGN_BYTES // bucket.dtype.itemsize
            size = -(-bucket.numel // (ranks * align)) * align
            bounds.append(tuple(min(r * size, bucket.numel) for r in range(ranks + 1)))
    return Pieces(axis, rank, buckets, tuple(bounds), shapes, frozenset(owner))


def labels(optimizer: Optimizer) -> Callable[[str], Hashable]:
    """Path -> label: equal for parameters that one kernel may step together."""

    def label(path: str) -> Hashable:
        part = optimizer.at(path)
        return id(part) if part.elementwise else path

    return label


def owners(params: Mapping[str, Tensor], optimizer: Optimizer, ranks: int) -> dict[str, int]:
    """Path -> rank, for the parameters whose optimizer needs the whole leaf.

    The costliest come first, each to the rank with the least cost so far.
    """
    if optimizer.check:
        optimizer.check(params)  # a cost is that of a parameter that the optimizer takes
    cost = {path: optimizer.at(path).cost(p.shape) for path, p in params.items() if not optimizer.at(path).elementwise}
    load, found = [0.0] * ranks, {}
    for path in sorted(cost, key=lambda path: -cost[path]):
        found[path] = min(range(ranks), key=load.__getitem__)
        load[found[path]] += cost[path]
    return found


Spot = tuple[int, ...]  # a rank's place along the axes over which values differ


def merged(
    values: Mapping[Spot, Tensor], sizes: Sequence[int], place: Spot, merge: Merge, start: Tensor | None
) -> Tensor:
    """The value of one of the new ranks.

    Args:
        values: Those of all old ranks, by their place.
        sizes: The new sizes of these axes.
        place: The place of the new rank.
        merge: How they are merged; equal values are kept, where they are not summed.
        start: The value at the start of a run, for `Merge.RESTART`.

    Raises:
        ValueError: the values differ, and cannot be merged.

    >>> old = {(0,): torch.tensor(1.0), (1,): torch.tensor(2.0), (2,): torch.tensor(4.0)}
    >>> [merged(old, (2,), (rank,), Merge.SUM, None).item() for rank in range(2)]
    [5.0, 2.0]
    >>> merged(old, (4,), (3,), Merge.SUM, None).item()
    0.0
    """
    first, *others = values.values()
    adds = merge in (Merge.SUM, Merge.SHARE)
    if not adds:
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in values.values()]
        if all(x.shape == first.shape and torch.equal(own, bits[0]) for x, own in zip(others, bits[1:], strict=True)):
            return first
    if merge is Merge.MEAN:
        together = torch.stack([first, *others])
        if not first.is_floating_point():  # counters, such as those of a normalization
            return together.amax(0)
        return together.to(torch.promote_types(first.dtype, torch.float32)).mean(0).to(first.dtype)
    if merge is Merge.RESTART and start is not None:
        return start
    if not adds:
        raise ValueError("the ranks had values of their own, which no rule merges for another number of ranks")
    # Places beyond the new sizes are folded onto the others.
    folded = {old: tuple(at % size for at, size in zip(old, sizes, strict=True)) for old in sorted(values)}
    mine = [values[old] for old, new in folded.items() if new == place]
    if not mine:
        return torch.zeros_like(first)
    total = torch.stack(mine).sum(0, dtype=first.dtype)
    if merge is Merge.SHARE:  # (weight, divisor): the divisor is that of the first
        total[..., 1] = mine[0][..., 1]
    return total


class _Bound(threading.local):
    pieces: Pieces | None = None


_BOUND = _Bound()


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
    if _BOUND.pieces is not None:
        return _BOUND.pieces
    paths, leaves, _ = trees.flatten_in_insertion_order(tree)
    named: dict[str, Any] = dict(zip(paths, leaves, strict=True))
    return cut(named, None, axis, axis_size(axis), int(axis_index(axis)), 2**62, 2**62)
