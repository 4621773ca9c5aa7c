"""Clipping, by norm and by value."""

from __future__ import annotations

import numbers
from typing import Literal, NamedTuple

import optree
import torch

from ..axes._collectives import psum
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._transform import ByNorm, Needs, Transform, init_empty
from ..tree._tree import State, Tree, global_norm, to_device


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, numbers.Real) and value > 0):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6))."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class ClipState(NamedTuple):
    norm: torch.Tensor  # the norm of the last call's gradients before clipping, 0-d float64; NaN before the first call

    def or_else(self, norm: torch.Tensor) -> torch.Tensor:
        """The last call's norm if it is finite, `norm` otherwise."""
        before = to_device(norm.device, self.norm, norm.dtype)
        return torch.where(torch.isfinite(before), before, norm)


@factory
def clip_by_global_norm(max_norm: float, mode: Literal["exact", "previous"] = "exact") -> Transform:
    """Scales all gradients by one factor to a global norm of at most `max_norm`.

        g <- g min(1, max_norm / (|g| + 1e-6)),   |g|^2 = sum of squares over all leaves

    Put it after the reduction, so that it clips the norm of the mean. It needs the whole tree, so it waits for all
    messages. A NaN or infinity in any leaf makes all leaves NaN.

    With mode="previous" |g| is the norm of the last call's gradients before they were clipped.
    The norm of the result may exceed `max_norm` by the factor by which the norm has grown since the last call. The
    first call, and a call after a norm that was not finite, is exact.

    Args:
        max_norm: The largest norm; above 0.
        mode: The norm to use: "exact", of these gradients, or "previous", of the last call's gradients.

    Returns:
        A `Transform` without state, or with `ClipState(norm)` where mode="previous". `extra["sharded_over"]` gives the
        names of the axes over which the tree is sharded; the squares are summed across them.

    Raises:
        ValueError: `max_norm` is not above 0; `mode` is none of the two.

    Same as: torch.nn.utils.clip_grad_norm_, norm_type=2; optax.clip_by_global_norm has no 1e-6.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, ())[0]
    {'w': tensor([0.6000, 0.8000])}
    >>> late = clip_by_global_norm(1.0, mode="previous")
    >>> _, state = late.update(torch.tensor(4.0), late.init(torch.tensor(0.0)))
    >>> late.update(torch.tensor(2.0), state)[0]
    tensor(0.5000)
    """
    _positive("max_norm", max_norm)
    if mode not in ("exact", "previous"):
        raise ValueError(f"mode must be 'exact' or 'previous', got {mode!r}")

    def init(params: Tree) -> State:
        del params
        return ClipState(torch.tensor(float("nan"), dtype=torch.float64)) if mode == "previous" else ()

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        del params
        norm = global_norm(grads)
        if call.sharded_over:
            norm = psum(norm * norm, call.sharded_over).sqrt()
        factor = clip_factor(norm if mode == "exact" else state.or_else(norm), max_norm)
        new = state if mode == "exact" else ClipState(norm.to(torch.float64))
        return optree.tree_map(lambda g: g * factor.to(g.dtype), grads), new

    return Transform(
        init,
        update,
        takes=("sharded_over",),
        by_norm=ByNorm(
            lambda norm: clip_factor(norm, max_norm), mode == "previous", ClipState if mode == "previous" else None
        ),
    )


@factory
def clip_by_value(max_value: float) -> Transform:
    """Clips every element to [-max_value, max_value]; a NaN stays a NaN.

    Args:
        max_value: The largest absolute value; above 0.

    Returns:
        A `Transform` without state.

    Raises:
        ValueError: `max_value` is not above 0.

    Same as: torch.nn.utils.clip_grad_value_; optax.clip.

    >>> clip_by_value(1.0).update({"w": torch.tensor([0.5, -4.0])}, ())[0]
    {'w': tensor([ 0.5000, -1.0000])}
    """
    _positive("max_value", max_value)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        del params, call
        return optree.tree_map(lambda g: g.clamp(-max_value, max_value), grads), state

    return Transform(init_empty, update, Needs.NOTHING)
