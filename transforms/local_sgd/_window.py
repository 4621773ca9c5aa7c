"""The mean over ranks of values that were trained in a window of several steps."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from .._axis_env import bound
from .._check import AxisName
from ..axes._primitive import names
from ..codecs._codec import Codec
from ..feedback._error_feedback import error_feedback
from ..pipelines._rates import NAME, Rates, check_sum, number_of
from ..plan._plan import axes_of
from ..reductions._compress import quantized_mean
from ..reductions._mean import mean
from ..transform._call import Call
from ..transform._inner import Inner
from ..transform._transform import Transform, check_transform
from ..transform._weights import Over, check_over, check_weight
from ..tree._tree import Tree, readable_without_sync


class WindowMean:
    """A reduction of parameters, or of their changes.

    Args:
        hook: The reduction, with over="weight".
        over: The weights of the ranks: those of their windows ("weight"), 1 for each rank with a window of weight above
            0 ("live"), or 1 for each rank ("world").
    """

    def __init__(self, hook: Transform, over: Over) -> None:
        check_over(over)
        self._inner, self._over = Inner(hook, "hook"), over

    def __call__(
        self, values: Tree, state: Any, call: Call, rates: Rates = (), weight: Any = None
    ) -> tuple[Tree, Any, Tensor]:
        """The mean, the hook's new state, and whether any rank has weight, 0-d bool.

        Sums of weight * value would overflow float16, and bfloat16 would round them: the mean is taken in at least
        float32.

        Args:
            state: The outer state.
            call: The outer call.
            rates: Hyperparameters that must be the same on all ranks.
            weight: The weight of this rank's window, where it is not that of the call.

        Raises:
            DesyncError: they are not.
        """
        weight = check_weight(call.weight if weight is None else weight)
        factor: Any = {"weight": weight, "live": (weight > 0).to(weight.dtype), "world": None}[self._over]
        if factor is not None and readable_without_sync(factor):
            factor = factor.item()  # saves passes over the values
        lane = {"weight": weight, **({NAME: number_of(rates)} if rates else {})}
        inside = call.inside(weight=factor, lane=lane, persistent=False, flush=False)
        new, inner = self._inner.run(at_least_f32(values), state, None, inside)
        sums = self._inner.transform.sums
        assert sums is not None
        summed = sums(inner).lane
        if rates:
            axes = tuple(name for name in bound() if name in axes_of(self._inner.transform, tuple(bound())))
            check_sum(rates, summed[NAME], axes, call.step or 0)
        return new, inner, summed["weight"] > 0


def reduction(name: str, axis: AxisName, wire: Codec | Transform | None) -> Transform:
    """The mean of changes of parameters.

    Args:
        name: The factory, for errors.
        wire: None for a plain mean; a codec, whose error is fed back; or the reduction itself.

    Raises:
        ValueError: the wire is a reduction that is not over all of these axes.
        TypeError: it is neither a codec nor a reduction.
    """
    if wire is None:
        return mean(axis)
    if isinstance(wire, Codec):
        return error_feedback(quantized_mean(axis, wire))
    check_reduces(name, check_transform(wire, f"{name}: wire"))
    if missing := set(names(axis)) - axes_of(wire, names(axis)):
        raise ValueError(
            f"{name}: wire={wire!r} does not reduce over {sorted(missing)}, but the average is over {axis!r}; give the wire these "
            f"axes"
        )
    return wire


def check_reduces(name: str, hook: Transform) -> Transform:
    """Raise TypeError unless a transform carries the lane, and so knows the weight of all ranks."""
    if hook.sums is None:
        raise TypeError(
            f"{name}: {hook!r} is no reduction that all parameters share; use mean, quantized_mean, error_feedback(...) and so on"
        )
    return hook


def at_least_f32(values: Tree) -> Tree:
    return optree.tree_map(lambda v: v.to(torch.promote_types(v.dtype, torch.float32)), values)


def like(values: Tree, given: Tree) -> Tree:
    """The values in the dtypes of the given tree."""
    return optree.tree_map(lambda v, g: v.to(g.dtype), values, given)


def no_weight() -> Tensor:
    return torch.zeros((), dtype=torch.float64)
