"""The reductions of gradients: mean, sum_over, noop.

A rank without input takes part with weight 0 and contributes exactly nothing; that is all that
uneven inputs need.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from .._base import Transform, init_empty
from .._bucketwise import Carried
from .._spec import factory
from .._tree import Tree, named_leaves, plain
from ..axes._collectives import axis_size, psum
from ..axes._primitive import AxisName
from ..wire._codec import Codec, refuse_derivative
from ..wire._memory import Memory
from ..wire._reduce import Reduced, coded_mean
from ._lane import Lane, decode_lane, encode_lane
from ._lane import lane_dtype as dtype_of_lane

Over: TypeAlias = Literal["weight", "live", "world"]


class MeanState(NamedTuple):
    """What the last message brought besides the gradients."""

    total: Tensor  # what the sum was divided by, 0-d float64
    lane: dict[str, Tensor]  # the sums of the lane by name, 0-d float64


def init_mean(params: Tree) -> MeanState:
    del params
    return MeanState(torch.zeros((), dtype=torch.float64), {})


def check_over(over: Any) -> None:
    if over not in ("weight", "live", "world"):
        raise ValueError(f"over must be 'weight', 'live' or 'world', got {over!r}")


def check_weight(weight: Any) -> Tensor:
    """The weight as a 0-d float64 tensor; None is 1.

    Raises:
        ValueError: a host number that is negative, NaN or infinite, or a tensor that is not 0-d.
    """
    if weight is None:
        return torch.ones((), dtype=torch.float64)
    if isinstance(weight, Tensor):
        if weight.dim():
            raise ValueError(f"weight must be a scalar, got a tensor of shape {tuple(weight.shape)}")
        return weight.to(torch.float64)
    if not (isinstance(weight, numbers.Real) and math.isfinite(weight) and float(weight) >= 0):
        raise ValueError(
            f"weight must be a finite number that is not negative, got {weight!r}; a rank without input has weight 0"
        )
    return torch.tensor(float(weight), dtype=torch.float64)


def share(weight: Tensor, over: Over) -> Tensor:
    """The factor of this rank's gradients in the sum: its weight, or 1 where only counts matter."""
    return weight if over == "weight" else (weight > 0).to(weight.dtype)


def known_share(weight: Any, over: Over) -> float | None:
    """`share` where it is known on the host, so that 1 and 0 cost nothing; else None."""
    if isinstance(weight, Tensor):
        return None
    given = 1.0 if weight is None else float(weight)
    return given if over == "weight" else float(given > 0)


def _weighted_sum(
    grads: Tree,
    axis: AxisName,
    weight: Any,
    lane: Lane | None,
    over: Over,
    carried: Carried | None,
    dtype: torch.dtype | None,
) -> tuple[Tree, MeanState]:
    factor = share(check_weight(weight), over)
    n, known = axis_size(axis), known_share(weight, over)

    def scale(g: Tensor) -> Tensor:
        if known is not None:
            return g if known == 1.0 else g * known if known else torch.zeros_like(g)
        # A rank of weight 0 adds nothing, whatever its gradients hold: 0 * nan would be nan.
        return torch.where(factor > 0, g * factor.to(g.dtype), torch.zeros_like(g))

    scaled = optree.tree_map(scale, grads)
    if carried is not None:
        return psum(scaled, axis), carried_state(carried)
    full = {"total": factor, **(lane or {})}
    if lane and "total" in lane:
        raise ValueError("'total' in the lane is taken by the sum of the weights; choose another name")
    leaves = optree.tree_leaves(grads)
    device = leaves[0].device if leaves else None
    words = encode_lane(full, dtype or dtype_of_lane(leaf.dtype for leaf in leaves), n, device)
    summed, words = psum((scaled, words), axis)
    sums = decode_lane(words, full, n)
    return summed, MeanState(sums.pop("total"), sums)


def _encoded_sum(
    grads: Tree, axis: AxisName, weight: Any, lane: Lane | None, over: Over | None, carried: Carried | None,
    wire: Codec, memory: Memory | None,
) -> tuple[Tree, MeanState]:  # fmt: skip
    """`mean`, or the weighted sum where `over` is None, with all leaves in one message, encoded."""
    factor, named = share(check_weight(weight), over or "weight"), {} if carried is not None else dict(lane or {})
    if "total" in named:
        raise ValueError("'total' in the lane is taken by the sum of the weights; choose another name")
    of = named_leaves(grads)
    refuse_derivative(of.values(), "differentiate through the hook without its codec, or detach the gradients")
    leaves, device = list(of.values()), next(iter(of.values())).device if of else None
    factor = factor.to(device)
    flat, words = _flat(leaves, device), encode_lane(named, torch.float64, 1, device)
    known = known_share(weight, over or "weight")
    if known is None:  # 0 * nan would be nan
        flat = torch.where(factor > 0, flat, torch.zeros_like(flat))
    elif known == 0.0:
        flat = torch.zeros_like(flat)
    if memory is None:
        reduced = coded_mean(wire, flat, factor, words, axis)
    else:
        errors = [memory.error[path] for path in of]
        reduced, lost = _with_memory(wire, flat, _flat(errors, device), factor, known, words, axis, memory.flush)
        memory.new.update(zip(of, _like(lost, errors), strict=True))
    ranks, total = axis_size(axis), reduced.total
    full = reduced.mean
    if over in (None, "world"):
        full = full * (total if over is None else total / ranks).to(torch.float32)
    out = like(full, grads)
    if carried is not None:
        return out, carried_state(carried)
    told = torch.full_like(total, ranks) if over == "world" else total
    return out, MeanState(told, decode_lane(reduced.words, named, 1))


def _with_memory(
    wire: Codec, flat: Tensor, error: Tensor, factor: Tensor, known: float | None, words: Tensor, axis: AxisName, flush: bool
) -> tuple[Reduced, Tensor]:  # fmt: skip
    """Send what is owed besides; what came of it, and what is owed then, in sums of weight * gradient."""
    if known is None:
        owed = flat * factor.to(torch.float32) + error
        times = torch.where(factor > 0, factor, torch.full_like(factor, float(flush)))
        sends = times > 0
        given = torch.where(sends, owed / torch.where(sends, times, torch.ones_like(times)).to(torch.float32), 0.0)
    else:
        owed, scale = torch.add(error, flat, alpha=known) if known else error, known or float(flush)
        times = torch.full_like(factor, scale)
        given = owed if scale == 1.0 else owed / scale if scale else torch.zeros_like(owed)
    reduced = coded_mean(wire, given, factor, words, axis, times)
    assert reduced.lost is not None
    if known is None:
        return reduced, torch.where(sends, reduced.lost, owed + reduced.lost)
    return reduced, reduced.lost if scale else owed + reduced.lost


def _flat(leaves: list[Tensor], device: torch.device | None) -> Tensor:
    flat = [leaf.reshape(-1).to(torch.float32) for leaf in leaves]
    return flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.zeros(0, device=device)


def like(flat: Tensor, tree: Tree) -> Tree:
    """Flat values in the form, the shapes and the dtypes of a tree."""
    leaves, structure = optree.tree_flatten(tree)
    return optree.tree_unflatten(structure, _like(flat, [torch.as_tensor(leaf) for leaf in leaves]))


def _like(flat: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([leaf.numel() for leaf in leaves]) if leaves else ()
    return [piece.view(leaf.shape).to(leaf.dtype) for piece, leaf in zip(pieces, leaves, strict=True)]


def carried_state(carried: Carried) -> MeanState:
    state = carried.get()
    if not isinstance(state, MeanState):
        raise TypeError(
            f"extra['carried'] gave a {type(state).__name__} where this stage's own MeanState was expected; a transform that "
            f"runs another must hand on carried.at(field) of its state"
        )
    return state


@factory
def mean(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of all ranks' gradients, weighted.

    With w_r the weight of rank r and [.] 1 where it holds, else 0:

        over="weight"   sum_r w_r g_r       / sum_r w_r
        over="live"     sum_r [w_r > 0] g_r / sum_r [w_r > 0]
        over="world"    sum_r [w_r > 0] g_r / size of the axis

    The weight and the lane ride in the message that carries the gradients. Where all weights are
    0 the result is 0.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: What to divide by.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`, the sums that came with the last message.

    Raises:
        ValueError: `over` is none of the three; at `update`: the weight is negative or not finite.
        UnboundAxis: at `update`: nothing binds `axis`.

    Same as: the all-reduce of torch's DDP; over="world" and "live" are
        divide_by_initial_world_size=True and False of torch's Join.

    >>> from fjoin import transforms as tx
    >>> def one_rank(g, n):
    ...     hook = tx.mean("data")
    ...     return hook.update(g, hook.init(g), weight=n)[0]
    >>> tx.simulate(one_rank, {"data": 3}, [1.0, 4.0, 9.0], [2, 1, 0])
    [tensor(2.), tensor(2.), tensor(2.)]
    """
    check_over(over)

    def update(
        grads: Tree, state: MeanState, params: Tree = None, *, weight: Any = None, lane: Lane | None = None,
        carried: Carried | None = None, lane_dtype: torch.dtype | None = None, wire: Codec | None = None, memory: Memory | None = None,
        **extra: Any,
    ) -> tuple[Tree, MeanState]:  # fmt: skip
        del state, params, extra
        grads = optree.tree_map(torch.as_tensor, grads)
        if wire is not None and axis_size(axis) > 1:
            return _encoded_sum(grads, axis, weight, lane, over, carried, wire, memory)
        summed, new = _weighted_sum(grads, axis, weight, lane, over, carried, lane_dtype)
        if over == "world" and carried is None:
            new = new._replace(total=torch.full_like(new.total, axis_size(axis)))
        divisor = torch.where(new.total == 0, torch.ones_like(new.total), new.total)
        leaves = optree.tree_leaves(summed)
        if leaves and plain(leaves):  # psum's results are fresh
            torch._foreach_div_(leaves, divisor)
            return summed, new
        return optree.tree_map(lambda g: g / divisor.to(g.dtype), summed), new

    return Transform(init_mean, update, scope="element", sums=lambda state: state, wired=True)


@factory
def sum_over(axis: AxisName) -> Transform:
    """The weighted sum of all ranks' gradients, sum_r w_r g_r, without a division.

    Args:
        axis: The axis, or a tuple of axes, to sum over.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`, total being the sum of the weights.

    Raises:
        ValueError, UnboundAxis: at `update`, as `mean`.

    >>> from fjoin import transforms as tx
    >>> def one_rank(g):
    ...     hook = tx.sum_over("data")
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [1.0, 4.0])
    [tensor(5.), tensor(5.)]
    """

    def update(
        grads: Tree, state: MeanState, params: Tree = None, *, weight: Any = None, lane: Lane | None = None,
        carried: Carried | None = None, lane_dtype: torch.dtype | None = None, wire: Codec | None = None, memory: Memory | None = None,
        **extra: Any,
    ) -> tuple[Tree, MeanState]:  # fmt: skip
        del state, params, extra
        grads = optree.tree_map(torch.as_tensor, grads)
        if wire is not None and axis_size(axis) > 1:
            return _encoded_sum(grads, axis, weight, lane, None, carried, wire, memory)
        return _weighted_sum(grads, axis, weight, lane, "weight", carried, lane_dtype)

    return Transform(init_mean, update, scope="element", sums=lambda state: state, wired=True)


@factory
def noop() -> Transform:
    """Send nothing: every rank keeps its own gradients.

    The upper bound of what any hook can save, and the hook of methods that average parameters.

    Same as: torch.distributed's ddp_comm_hooks.debugging_hooks.noop_hook.

    >>> from fjoin import transforms as tx
    >>> tx.noop().update(torch.tensor(2.0), ())
    (tensor(2.), ())
    """

    def update(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        del params, extra
        return grads, state

    return Transform(init_empty, update, scope="element")
