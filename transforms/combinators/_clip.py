"""Clipping, by norm and by value."""

from __future__ import annotations

import numbers

import optree
import torch

from ..axes import psum
from ..base import ByNorm, Call, Facts, Needs, State, Transform, Tree, factory, trees


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, numbers.Real) and value > 0):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")


def norm_of(grads: Tree, call: Call) -> torch.Tensor:
    """The norm of all gradients, those of the other ranks' pieces included."""
    norm = trees.global_norm(grads)
    return psum(norm * norm, call.sharded_over).sqrt() if call.sharded_over else norm


def _clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6))."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@factory
def clip_by_global_norm(max_norm: float) -> Transform:
    """Scales all gradients by one factor to a global norm of at most `max_norm`.

        g <- g min(1, max_norm / (|g| + 1e-6)),   |g|^2 = sum of squares over all leaves

    Put it after the reduction, so that it clips the norm of the mean. It needs the whole tree, so it waits for all
    messages. A NaN or infinity in any leaf makes all leaves NaN.

    Args:
        max_norm: The largest norm; above 0.

    Returns:
        A `Transform` without state. Where its keyword `sharded_over` names the axis over which the tree is sharded, the
        squares are summed across that axis.

    Raises:
        ValueError: `max_norm` is not above 0.

    Same as: torch.nn.utils.clip_grad_norm_, norm_type=2; optax.clip_by_global_norm has no 1e-6.

    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, ())[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    _positive("max_norm", max_norm)

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        factor = _clip_factor(norm_of(grads, call), max_norm)
        return optree.tree_map(lambda g: g * factor.to(g.dtype), grads), state

    facts = Facts(takes=("sharded_over",), by_norm=ByNorm(lambda norm: _clip_factor(norm, max_norm)))
    return Transform(lambda params: (), update, facts=facts)


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
        return optree.tree_map(lambda g: g.clamp(-max_value, max_value), grads), state

    return Transform(lambda params: (), update, Needs.NOTHING)
