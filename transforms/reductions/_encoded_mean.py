"""A weighted mean or sum of trees of gradients, with all leaves in one encoded message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import optree
import torch
from torch import Tensor

from .._check import AxisName, real
from ..axes._collectives import axis_size
from ..codecs._codec import refuse_derivative
from ..codecs._random_bits import places_of
from ..transform._call import Call
from ..transform._rider import Rider
from ..transform._weights import Over, RankWeight, nonzero_or_one
from ..tree._tree import Tree, device_of, named_leaves, plain, readable_without_sync
from ._coded_mean import Reduced, Term, coded_mean
from ._reduction import Sums


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
