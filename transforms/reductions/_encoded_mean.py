"""A weighted mean or sum of trees of gradients, with all leaves in one encoded message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from .._axis_env import AxisName
from .._call import Call
from .._check import real
from .._rider import Rider
from .._tree import Tree, device_of, named_leaves, plain, readable_without_sync
from .._weights import Over, RankWeight
from ..axes._collectives import axis_size
from ..codecs._codec import Codec, refuse_derivative
from ..codecs._random_bits import places_of
from ._coded_mean import Reduced, coded_mean
from ._reduction import Sums


def encoded_mean(
    wire: Codec, grads: Tree, axis: AxisName, share: RankWeight, over: Over | None, rider: Rider, call: Call,
    reduce: Callable[..., Reduced] = coded_mean, into: Callable[[Tensor], Tree] | None = None,
) -> Sums:  # fmt: skip
    """The weighted mean, or the weighted sum where `over` is None.

    Args:
        share: This rank's factor.
        rider: Its words travel in the messages, in float64.
        call: Of it, `memory` and `donated` are used: whether the mean may be written over the gradients.
        reduce: The reduction of one message: `coded_mean` or a function like it.
        into: From the flat mean to the result; by default a tree like the gradients.

    Raises:
        RuntimeError: something differentiates through the gradients.
    """
    of = named_leaves(grads)
    real(of, "an encoded mean")
    refuse_derivative(of.values(), "differentiate through the hook without its codec, or detach the gradients")
    device, memory = device_of(of.values()), call.memory
    share = share.to(device)
    flat, words = ravel(of.values(), device), rider.words(torch.float64, 1, device)
    room = flat if call.donated and plain(flat) and flat.is_contiguous() else None
    flat = share.masked(flat)
    positions = places_of(of, device) if wire.stochastic else None
    if memory is None:
        reduced = reduce(wire, flat, share.factor, words, axis, positions=positions, out=room)
    else:
        errors = memory.residuals(of, share)
        message = MessageWithResidual(flat, ravel(errors, device), share, memory.flush)
        reduced = reduce(
            wire, message.floats, share.factor, words, axis, times=message.times, positions=positions, out=room
        )
        divisor = reduced.total
        if over in (None, "world"):
            divisor = torch.full_like(divisor, 1 if over is None else axis_size(axis))
        memory.keep(of, split(message.residual(reduced), errors), share, divisor)
        if memory.per_rank and reduced.coded is not None:
            memory.coded.update(zip(of, split(reduced.coded, errors), strict=True))
    total, full = reduced.total, reduced.mean
    if over is None:
        full = full * total.to(torch.float32)
    elif over == "world":
        full = full * (total / axis_size(axis)).to(torch.float32)
    return Sums(into(full) if into else unravel(full, grads), total, reduced.words)


class MessageWithResidual:
    """This rank's message with its residual added, and the residual after it, in units of weight * gradient.

    floats: (n,) float32, the values to send.
    times: Their multiplier, 0-d float64: the rank's factor, or 1 where that is 0 and the residual is flushed.
    """

    def __init__(self, flat: Tensor, error: Tensor, share: RankWeight, flush: bool) -> None:
        self._error = error
        factor, known = share
        if known is None:
            self._sum = flat * factor.to(torch.float32) + error
            self.times = torch.where(factor > 0, factor, torch.full_like(factor, float(flush)))
            self._sends: Tensor | bool = self.times > 0
            divisor = torch.where(self._sends, self.times, torch.ones_like(self.times)).to(torch.float32)
            self.floats = torch.where(self._sends, self._sum / divisor, 0.0)
        else:
            self._sum, scale = torch.add(error, flat, alpha=known) if known else error, known or float(flush)
            self.times = torch.full_like(factor, scale)
            self._sends = scale > 0
            self.floats = self._sum if scale == 1.0 else self._sum / scale if scale else torch.zeros_like(self._sum)

    def residual(self, reduced: Reduced) -> Tensor:
        """The new residual; the old one where the mean is not finite or no rank has weight: no step is taken then."""
        lost = reduced.lost
        assert lost is not None
        if isinstance(self._sends, Tensor):
            residual = torch.where(self._sends, lost, self._sum + lost)
        else:
            residual = lost if self._sends else self._sum + lost
        counted = reduced.total != 0
        if readable_without_sync(reduced.mean) and bool(torch.isfinite(reduced.mean.sum()) & counted):
            return residual
        return torch.where(torch.isfinite(reduced.mean).all() & counted, residual, self._error)


def ravel(leaves: Any, device: torch.device | None) -> Tensor:
    """All leaves as one flat float32 tensor."""
    flat = [leaf.reshape(-1).to(torch.float32) for leaf in leaves]
    return (
        flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float32, device=device)
    )


def unravel(flat: Tensor, tree: Tree) -> Tree:
    """Flat values with the structure, the shapes and the dtypes of a tree."""
    leaves, structure = optree.tree_flatten(tree)
    return optree.tree_unflatten(structure, split(flat, [torch.as_tensor(leaf) for leaf in leaves]))


def split(flat: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([leaf.numel() for leaf in leaves]) if leaves else ()
    return [piece.view(leaf.shape).to(leaf.dtype) for piece, leaf in zip(pieces, leaves, strict=True)]
