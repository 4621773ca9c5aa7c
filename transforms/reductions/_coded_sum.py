"""Sums over ranks of floats that a codec encodes, whole trees in one message, with their residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import optree
import torch
from torch import Tensor

from ..axes import all_gather, all_to_all, axis_index, axis_size, names
from ..base import (
    AxisName,
    Call,
    Share,
    Tree,
    device_of,
    is_host,
    named_leaves,
    plain,
    readable_without_sync,
    real,
    to_device,
)
from ..codecs import Codec, encode_rows, places_of, refuse_derivative

# Floats that are decoded at a time: all ranks' floats do not fit a CPU's cache, and much memory is not given to one launch.
_DECODED, _DECODED_IN_A_LAUNCH = 2**17, 2**25

# (codec, floats, the position of each float or None, whether losses are needed) -> the sum, and what this rank's messages lose
Reduce: TypeAlias = Callable[[Codec, Tensor, "Tensor | None", bool], "tuple[Tensor, Tensor | None]"]


class Residuals:
    """The residuals of one call inside error feedback. An encoded reduction adds them to what it sends, and keeps new ones.

    Only the paths in `old` have residuals. Others have none, such as those of a mean that only a codec around the whole
    transform encodes.

    Attributes:
        old: Path -> residual before the call, in units of the mean.
        new: Path -> residual after the call.
    """

    def __init__(self, old: Mapping[str, Tensor]) -> None:
        self.old, self.new = old, dict[str, Tensor]()

    def of(self, leaves: Mapping[str, Tensor]) -> list[Tensor]:
        """The residuals of leaves, in their order; zeros for those without one."""
        found = []
        for path, leaf in leaves.items():
            error = self.old.get(path)
            if error is None:
                error = torch.zeros_like(leaf, dtype=torch.float32)
            if error.shape != leaf.shape:
                raise ValueError(
                    f"the residual of {path!r} in the state has shape {tuple(error.shape)}, but the gradient {tuple(leaf.shape)}; it "
                    f"is the state of other parameters: start from init(params)"
                )
            found.append(error)
        return found

    def keep(self, new: Mapping[str, Tensor]) -> None:
        """Keep new residuals. Raises ValueError if a path has a new residual already."""
        for path, value in new.items():
            if path in self.new:
                raise ValueError(
                    f"the gradient at {path!r} is encoded twice inside one error feedback, which has one memory; write "
                    f"chain(error_feedback(a), error_feedback(b))"
                )
            if path in self.old:
                self.new[path] = value


def usable(share: Share, total: Tensor) -> bool | Tensor:
    """Whether a sum is used: some rank has weight, and it is finite. Otherwise no step is taken, and residuals stay."""
    if isinstance(share.alive, bool) and readable_without_sync(total):
        return share.alive and bool(torch.isfinite(total.sum()) or torch.isfinite(total).all())
    finite = torch.linalg.vector_norm(total, math.inf) < math.inf if total.numel() else True
    return share.is_alive(total.device) & finite


def choose(fine: bool | Tensor, new: Tensor, old: Tensor) -> Tensor:
    """One of two tensors; `new` is fresh."""
    if isinstance(fine, bool):
        return new if fine else old
    return torch.where(fine, new, old, out=new if plain(new, old) else None)


def coded_sum(
    axis: AxisName, codec: Codec, x: Tensor, places: Tensor | None = None, feeds: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The sum of all ranks' (n,) float32 through encoded messages, equal on all ranks to the bit.

    Two ranks send all their codes to each other. On three and more each rank sums one chunk, and sends the sum to all ranks,
    encoded again. Of several axes the last is summed first, and its result over the others.

    Args:
        places: (n,) int32, the position of each float, for a stochastic codec; see `places_of`.
        feeds: Whether the second result is needed. It lies in the memory of `x`.

    Returns:
        The sum, and the encoding error of this rank's message, plus that of the sum in the chunk that it summed.

    Raises:
        ValueError: `feeds` for several axes.
    """
    if feeds and len(names(axis)) > 1:
        raise ValueError(
            f"error feedback is over one axis, got {axis!r}; write chain(error_feedback(a), error_feedback(b)), one mean for each"
        )
    lost: Tensor | None = None
    for i, name in reversed(list(enumerate(names(axis)))):
        ranks, n = axis_size(name), len(x)
        if ranks == 1:
            continue
        # Ranks with equal inputs must use equal random bits.
        sender, group = (axis_index(names(axis)[:k]) if codec.stochastic else 0 for k in (i + 1, i))
        many = ranks > 2
        rows = cut(x, ranks if many else 1)
        at, size = None if places is None else cut(places, len(rows)), rows.shape[1]
        codes = encode_rows(codec, rows, sender, i, at)
        total = summed(codec, all_to_all(codes, name) if many else all_gather(codes[0], name), size)
        if feeds:  # behind the message, since codes may lie in the memory of x
            own = codec.decode(codes, size).flatten()[:n]
            lost = torch.sub(x, own, out=x if plain(x, own) else None)
        if many:
            here = to_device(x.device, axis_index(name)).view(1)
            mine = None if at is None else at.index_select(0, here)
            answer = encode_rows(codec, total.unsqueeze(0), group, i, mine, answer=True)
            if lost is not None:
                again = total - codec.decode(answer, size)[0]
                is_here = torch.arange(ranks, device=x.device).unsqueeze(1) == here
                lost = lost + torch.where(is_here, again, 0.0).flatten()[:n]
            total = codec.decode(all_gather(answer[0], name), size).flatten()
        x = total[:n]
    return x, torch.zeros_like(x) if feeds and lost is None else lost


def summed(codec: Codec, codes: Tensor, size: int) -> Tensor:
    """The sum of rows of codes, (rows, width) -> (size,), decoded a few at a time and added in their order."""
    total: Tensor | None = None
    floats = _DECODED if is_host(codes.device) else _DECODED_IN_A_LAUNCH
    for some in codes.split(max(1, floats // max(1, size))):
        for row in codec.decode(some, size).unbind(0):
            total = row if total is None else total.add_(row) if plain(total, row) else total + row
    assert total is not None
    return total


def cut(x: Tensor, rows: int) -> Tensor:
    """(n,) as (rows, size), padded with zeros at the end."""
    size = -(-x.numel() // rows)
    gap = rows * size - x.numel()
    return (torch.nn.functional.pad(x, (0, gap)) if gap else x).view(rows, size)


def send(of: dict[str, Tensor], share: Share, call: Call, reduce: Reduce) -> Tensor:
    """The sum of all ranks' share * gradient + residual through encoded messages, flat; it keeps the new residuals.

    Args:
        of: Path -> gradient.
        call: Of it, `wire`, `memory` and `donated` are used.
        reduce: The sum of one message, as of `coded_sum` over some axes.

    Raises:
        RuntimeError: something differentiates through the gradients.
    """
    real(of, "an encoded mean")
    refuse_derivative(of.values(), "differentiate through the hook without its codec, or detach the gradients")
    codec, memory, device = call.wire, call.memory, device_of(of.values())
    errors = None if memory is None else memory.of(of)
    given = ravel(of.values(), device)
    fresh = (call.donated or len(of) > 1) and plain(given)
    flat = share.times(given, None if errors is None else ravel(errors, device), in_place=fresh)
    if not flat.numel():
        return flat
    total, lost = reduce(codec, flat, places_of(of, device) if codec.stochastic else None, memory is not None)
    if errors is not None and lost is not None:
        kept = choose(usable(share, total), lost, ravel(errors, device))
        memory.keep(dict(zip(of, split(kept, errors), strict=True)))
    return total


def encoded(grads: Tree, share: Share, call: Call, reduce: Reduce) -> Tree:
    """`send` of a tree; a tree like it."""
    return unravel(send(named_leaves(grads), share, call, reduce), grads)


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
