"""Weighted means of messages, whole trees in one; a reduction as a transform."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ..axes import all_gather, all_to_all, axis_index, axis_size, names, note
from ..base import (
    EMPTY,
    AxisName,
    Call,
    Merge,
    Needs,
    Over,
    RankWeight,
    Reduction,
    Rider,
    Transform,
    Tree,
    axis_names,
    device_of,
    divisor_of,
    is_host,
    named_leaves,
    nonzero_or_one,
    plain,
    readable_without_sync,
    real,
    share_in,
    to_device,
    unless_idle,
)
from ..codecs import Codec, as_bytes, encode_rows, places_of, read, refuse_derivative


class MeanState(NamedTuple):
    """The total weight and the lane of the last message."""

    total: Annotated[Tensor, Merge.RESTART]  # the divisor of the sum, 0-d float64
    lane: dict[str, Tensor]  # the sums of the lane by name, 0-d float64

    @property
    def unread(self) -> tuple[str, ...]:
        """The fields that no later call reads: a checkpoint leaves them out, and a dict may have had other names in it."""
        return ("total", "lane")


def init_mean(params: Tree) -> MeanState:
    del params
    return MeanState(torch.zeros((), dtype=torch.float64), {})


class Sums(NamedTuple):
    """The result of a reduction."""

    out: Tree  # like the gradients
    total: Tensor  # the sum of the ranks' factors, 0-d float64
    rider: Tensor  # the sums of the rider, (scalars,) float64; not read where this call carries none
    kept: Tree = None  # the gradients in the form of `out`, where that is another one


Reduce: TypeAlias = Callable[[Tree, RankWeight, Rider, Call], Sums]


def reduction(
    axis: AxisName,
    over: Over | None,
    reduce: Reduce,
    needs: Needs = Needs.NOTHING,
    *,
    fusable: bool = False,
    scatters: bool = False,
    **fields: Any,
) -> Transform:
    """A transform that is one reduction, with a `MeanState` as state.

    Args:
        over: The divisor; None for a sum.
        reduce: `(gradients, factor, rider, call) -> sums`. It sums this rank's factor and the words of the rider in the
            message of the gradients.
        fusable, scatters: See `Reduction`.
        fields: The other fields of the transform.
    """

    def update(grads: Tree, state: MeanState, params: Tree, call: Call) -> tuple[Tree, MeanState]:
        del state, params
        grads = optree.tree_map(torch.as_tensor, grads)
        rider = Rider(call)
        found = reduce(grads, share_in(call, over or "weight"), rider, call)
        total, lane = rider.settle(found.total, found.rider)
        divisor = total
        if over == "world":  # of all axes, behind another reduction
            before = call.group.axes if call.group is not None else ()
            divisor = divisor_of(over, total, axis_size(tuple(dict.fromkeys((*before, *axis_names(axis))))))
        kept = grads if found.kept is None else found.kept
        return unless_idle(total, found.out, kept, call.persistent), MeanState(divisor, lane)

    reduces = Reduction(lambda state: state, axis=axis, over=over, fusable=fusable, scatters=scatters)
    return Transform(init_mean, update, needs, reduces, **fields)


Map: TypeAlias = Callable[[Tensor], Tensor]
Key: TypeAlias = Tensor | int  # of the random bits of a stochastic codec; see `encode_rows`
# Floats that are decoded at a time: all ranks' floats do not fit a CPU's cache, and much memory is not given to one launch.
_DECODED, _DECODED_IN_A_LAUNCH = 2**17, 2**25


class Term(NamedTuple):
    """This rank's term of a mean, and its form in messages."""

    codec: Codec
    floats: Tensor  # (n,) float32; finite where `factor` is 0
    factor: Tensor  # its weight in the sum, 0-d float64, at least 0
    words: Tensor  # the words of the lane, (words,) float64
    # The multiplier of `floats`, where it is not `factor`; `lost` and `coded` are then computed.
    times: Tensor | None = None
    positions: Tensor | None = None  # (n,) int32, the position of each float, for a stochastic codec; see `places_of`
    rider: Rider = EMPTY  # the owner of the words

    def ends(self, rows: int) -> Tensor:
        """The end of every row, (rows, words) float64: the weight, `times` if it is given, and a part of the words."""
        if not self.rider.goes_along:
            return self.words.view(1, 0).expand(rows, 0)
        head = [self.factor] if self.times is None else [self.factor, self.times]
        share = -(-len(self.words) // rows)
        return torch.cat([*(x.view(1, 1).expand(rows, 1) for x in head), cut(self.words, rows, share)], dim=1)


class Parts(NamedTuple):
    """The parts of the ranks in a mean."""

    total: Tensor  # the sum of their weights, 0-d float64
    each: tuple[Tensor, ...]  # the factors of their floats, 0-d float32


class Reduced(NamedTuple):
    mean: Tensor  # (n,) float32
    total: Tensor  # the sum of the factors, 0-d float64
    words: Tensor  # sums over the ranks of the lane's words, (words,) float64
    # The encoding error of times * floats, plus that of total * mean in the chunk that this rank summed, (n,) float32.
    lost: Tensor | None = None
    coded: Tensor | None = None  # where `lost` is computed: `floats` as the other ranks decode them, (n,) float32


def coded_mean(term: Term, axis: AxisName, out: Tensor | None = None) -> Reduced:
    """sum_r factor_r floats_r / sum_r factor_r over encoded messages; 0 where all factors are 0.

    Args:
        axis: The axis. Of several axes the last is reduced first, and its result over the others.
        out: A buffer for the mean, (n,) float32. It may be the floats, which are not read after that. It is used on two
            ranks only.

    Raises:
        ValueError: `times` is given for several axes.
    """
    if term.times is not None and len(names(axis)) > 1:
        raise ValueError(
            f"error feedback is over one axis, got {axis!r}; write chain(error_feedback(a), error_feedback(b)), one mean for each"
        )
    for i, name in reversed(list(enumerate(names(axis)))):
        # Ranks with equal inputs must use equal random bits.
        rank, group = (axis_index(names(axis)[:n]) if term.codec.stochastic else 0 for n in (i + 1, i))
        ranks = axis_size(name)
        if ranks == 1:
            mean = torch.where(term.factor > 0, term.floats, torch.zeros_like(term.floats))
            reduced = Reduced(mean, term.factor, term.words)
        elif ranks == 2:
            reduced = _sent(term, name, 1, lambda rows: all_gather(rows[0], name), rank, i, out)  # noqa: B023
        else:
            reduced = _in_chunks(term, name, rank, group, i)
        term = term._replace(floats=reduced.mean, factor=reduced.total, words=reduced.words)
    return reduced


def _in_chunks(term: Term, axis: str, rank: Key, group: Key, message: int) -> Reduced:
    """The mean in two messages: every rank reduces one chunk, and sends its mean to all ranks."""
    ranks, n = axis_size(axis), len(term.floats)
    reduced = _sent(term, axis, ranks, lambda rows: all_to_all(rows, axis), rank, message)
    mean, size, lost = reduced.mean, len(reduced.mean), reduced.lost
    here, places = torch.empty(0), None  # the index of this rank is only copied to a device where it is used
    if term.positions is not None or lost is not None:
        here = to_device(term.floats.device, axis_index(axis))
    if term.positions is not None:
        places = cut(term.positions, ranks, size).index_select(0, here.view(1))
    answer = encode_rows(term.codec, mean.unsqueeze(0), group, message, places, answer=True)
    back, words = _split(term.codec, all_gather(row_of(answer, reduced.words.unsqueeze(0))[0], axis), size)
    if lost is not None:
        again = encoding_error(mean, term.codec.decode(answer, size)[0], reduced.total)
        is_here = torch.arange(ranks, device=again.device).unsqueeze(1) == here
        lost = lost + torch.where(is_here, again, 0.0).flatten()[:n]
    mean = term.codec.decode(back, size).flatten()[:n]
    return reduced._replace(mean=mean, words=words.flatten()[: len(term.words)], lost=lost)


def _sent(
    term: Term, axis: AxisName, rows: int, move: Map, rank: Key, message: int, out: Tensor | None = None
) -> Reduced:
    """The mean of the rows that `move` brings, from this rank's floats and words in as many rows as it sends."""
    n = len(term.floats)
    size = -(-n // rows)
    note(axis, f"{n} floats")
    places = None if term.positions is None else cut(term.positions, rows, size)
    codes = encode_rows(term.codec, cut(term.floats, rows, size), rank, message, places)
    reduced = weighted_mean(term, axis, move(row_of(codes, term.ends(rows))), size, out)
    return reduced if term.times is None else with_error(reduced, term, term.codec.decode(codes, size).flatten()[:n])


def with_error(reduced: Reduced, term: Term, coded: Tensor) -> Reduced:
    """The reduction with the error of this rank's message, which the other ranks decode as `coded`."""
    assert term.times is not None
    return reduced._replace(lost=encoding_error(term.floats, coded, term.times), coded=coded)


def encoding_error(x: Tensor, decoded: Tensor, times: Tensor) -> Tensor:
    return (x - decoded).mul_(times.to(torch.float32))


def cut(x: Tensor, rows: int, size: int) -> Tensor:
    """(n,) as (rows, size), padded with zeros at the end."""
    gap = rows * size - x.numel()
    return (torch.nn.functional.pad(x, (0, gap)) if gap else x).view(rows, size)


def weighted_mean(term: Term, axis: AxisName, data: Tensor, n: int, out: Tensor | None = None) -> Reduced:
    """The weighted mean of the ranks' rows, the sum of the weights and the sums of the words.

    Args:
        term: This rank's term; the ends of its rows are like those of the others.
        n: The number of floats of a row.
    """
    codes, ends = _split(term.codec, data, n)
    sums, head = term.words, 1 if term.times is None else 2
    if term.rider.goes_along:
        sums = ends.sum(0)

    def parts() -> Parts:
        total = sums[0]
        one = total / total  # 1, but NaN where `total` is infinite: x / inf would be 0
        # If no rank has weight, flushed residuals are ignored.
        each = torch.where(total == 0, 0.0, ends[:, head - 1] / total * one).to(torch.float32)
        return Parts(total, each.unbind(0))

    total, (first, *others) = term.rider.once(f"parts over {axis}", parts)
    rows = _decoded(term.codec, codes, n)
    mean = torch.mul(next(rows), first, out=out)
    for row, factor in zip(rows, others, strict=True):
        mean = mean.addcmul_(row, factor) if plain(row) else mean.addcmul(row, factor)
    return Reduced(mean, total, sums[head:] if term.rider.goes_along else sums)


def _decoded(codec: Codec, codes: Tensor, n: int) -> Iterator[Tensor]:
    """The rows, decoded a few at a time. No variable keeps a row, so that its memory serves the next ones."""
    floats = _DECODED if is_host(codes.device) else _DECODED_IN_A_LAUNCH
    for some in codes.split(max(1, floats // max(1, n))):
        yield from codec.decode(some, n).unbind(0)


def row_of(codes: Tensor, words: Tensor) -> Tensor:
    """(rows, bytes): codes, padded to whole float64 words, then this rank's words."""
    if gap := -codes.shape[1] % 8:
        codes = torch.nn.functional.pad(codes, (0, gap))
    return torch.cat([codes, as_bytes(words)], dim=1) if words.shape[1] else codes


def _split(codec: Codec, data: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The codes of n floats, and the end, (rows, words), of rows of bytes."""
    width = codec.width(n)
    return data[:, :width], read(data[:, width + -width % 8 :], torch.float64)


def encoded_mean(
    grads: Tree,
    axis: AxisName,
    share: RankWeight,
    over: Over | None,
    rider: Rider,
    call: Call,
    reduce: Callable[..., Reduced] = coded_mean,
    into: Callable[[Tensor], Tree] | None = None,
) -> Sums:
    """The weighted mean, or the weighted sum where `over` is None.

    Args:
        share: This rank's factor.
        rider: Its words travel in the messages, in float64.
        call: Of it, `wire`, `memory` and `donated` are used. If donated, the mean may be written over the gradients.
        reduce: The reduction of one message: `coded_mean` or a function like it.
        into: From the flat mean to the result; by default a tree like the gradients.

    Raises:
        RuntimeError: something differentiates through the gradients.
    """
    of = named_leaves(grads)
    real(of, "an encoded mean")
    refuse_derivative(of.values(), "differentiate through the hook without its codec, or detach the gradients")
    device, wire, memory = device_of(of.values()), call.wire, call.memory
    share = share._replace(factor=rider.once("factor", lambda: share.to(device).factor))
    flat, words = ravel(of.values(), device), rider.words(torch.float64, 1, device)
    room = flat if call.donated and plain(flat) and flat.is_contiguous() else None
    positions = places_of(of, device) if wire.stochastic else None
    term = Term(wire, share.masked(flat), share.factor, words, positions=positions, rider=rider)
    divisor = 1 if over is None else axis_size(axis) if over == "world" else None

    def run(term: Term) -> Reduced:
        if not (len(term.floats) or rider.goes_along):  # there is nothing to send
            return Reduced(term.floats, rider.total, term.words, term.floats, term.floats)
        return reduce(term, axis, out=room)

    if memory is None:
        reduced = run(term)
    else:
        errors = memory.residuals(of, share, rider.once)
        reduced, residual = with_residual(run, term, share.known, ravel(errors, device), memory.flush)
        of_sums = reduced.total if divisor is None else torch.full_like(reduced.total, divisor)
        memory.keep(of, split(residual, errors), share, of_sums, rider.once)
        if memory.per_rank and reduced.coded is not None:
            memory.coded.update(zip(of, split(reduced.coded, errors), strict=True))
    mean, total = reduced.mean, reduced.total
    if divisor is not None:
        mean = mean * (total / divisor).to(torch.float32)
    return Sums(into(mean) if into else unravel(mean, grads), total, reduced.words)


def with_residual(
    reduce: Callable[[Term], Reduced], term: Term, known: float | None, error: Tensor, flush: bool
) -> tuple[Reduced, Tensor]:
    """The reduction of a term with this rank's residual added, and the new residual.

    Args:
        known: The factor of the term, where the host knows it.
        error: The residual, (n,) float32, in units of factor * floats.
        flush: Whether a rank whose factor is 0 sends its residual, with the multiplier 1.
    """
    scale = known or float(flush)
    if known is None:
        summed = term.floats * term.factor.to(torch.float32) + error
        times = torch.where(term.factor > 0, term.factor, torch.full_like(term.factor, scale))
        floats = torch.where(times > 0, summed / nonzero_or_one(times).to(torch.float32), 0.0)
    else:
        summed = error  # of use only where nothing is sent
        times = term.rider.once("times", lambda: torch.full_like(term.factor, scale))
        if known:
            floats = torch.add(error, term.floats, alpha=known)
            floats = floats if scale == 1.0 else floats.div_(scale)  # its memory is not needed twice
        else:
            floats = error if scale == 1.0 else torch.zeros_like(error)
    reduced = reduce(term._replace(floats=floats, times=times))
    assert reduced.lost is not None
    if known is None:
        residual = torch.where(times > 0, reduced.lost, summed + reduced.lost)
    else:
        residual = reduced.lost if scale else summed + reduced.lost
    counted = reduced.total != 0
    if readable_without_sync(reduced.mean) and bool(torch.isfinite(reduced.mean.sum()) & counted):
        return reduced, residual
    # The old one where the mean is not finite or no rank has weight: no step is taken then.
    fine = counted
    if reduced.mean.numel():
        fine = fine & (torch.linalg.vector_norm(reduced.mean, math.inf) < math.inf)
    # The new one is fresh in any case: it is a difference, or a sum.
    return reduced, torch.where(fine, residual, error, out=residual if plain(residual, error) else None)


def ravel(leaves: Iterable[Tensor], device: torch.device | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """All leaves as one flat tensor."""
    flat = [leaf.reshape(-1).to(dtype) for leaf in leaves] or [torch.zeros(0, dtype=dtype, device=device)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unravel(flat: Tensor, tree: Tree) -> Tree:
    """Flat values with the structure, the shapes and the dtypes of a tree."""
    leaves, structure = optree.tree_flatten(tree)
    return optree.tree_unflatten(structure, split(flat, [torch.as_tensor(leaf) for leaf in leaves]))


def split(flat: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([leaf.numel() for leaf in leaves]) if leaves else ()
    return [piece.view(leaf.shape).to(leaf.dtype) for piece, leaf in zip(pieces, leaves, strict=True)]
