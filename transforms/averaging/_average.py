"""Averages of parameters and of optimizer states over the weights of their windows."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import optree
import torch
from torch import Tensor

from ..axes import bound, pmax
from ..base import AxisName, Call, Facts, Needs, Over, State, Transform, Tree, factory, timings, trees
from ..combinators import every
from ..pipelines import Rates, axes_of, totals_of_step
from ..reductions import mean


class WindowMean:
    """A reduction of parameters, or of their changes.

    Its `over` gives the weights of the ranks: those of their windows ("weight"), 1 for each rank with a window of
    weight above 0 ("live"), or 1 for each rank ("world"). The ranks sum their weights in a message before.
    """

    def __init__(self, name: str, reduction: Transform) -> None:
        if reduction.one_reduction is None and not timings.reduced_over(reduction):
            raise TypeError(
                f"{name}: {reduction!r} is no reduction that all parameters share; use mean, compress(codec, mean(axis)), "
                f"error_feedback(...) and so on"
            )
        one = reduction.one_reduction
        self._reduction, self._over = reduction, None if one is None else one.over

    def __call__(
        self, values: Tree, state: Any, call: Call, rates: Rates = (), weight: Any = None
    ) -> tuple[Tree, Any, Tensor]:
        """The mean, the reduction's new state, and whether any rank has weight, 0-d bool.

        Sums of weight * value would overflow float16, and bfloat16 would round them: the mean is taken in at least
        float32.

        Args:
            state: That of the reduction.
            call: The outer call.
            rates: Hyperparameters that must be the same on all ranks.
            weight: The weight of this rank's window, where it is not that of the call.

        Raises:
            DesyncError: they are not.
        """
        axes = tuple(name for name in bound() if name in axes_of(self._reduction, tuple(bound())))
        own = call.inside(persistent=False, flush=False, **({} if weight is None else {"weight": weight}))
        totals = totals_of_step(own, axes, rates, values)
        own = own.inside(weight=None) if self._over == "world" else own
        new, inner = self._reduction.run(at_least_f32(values), state, None, own)
        return new, inner, torch.as_tensor(totals.weight) > 0


def at_least_f32(values: Tree) -> Tree:
    return optree.tree_map(lambda v: v.to(torch.promote_types(v.dtype, torch.float32)), values)


def like(values: Tree, given: Tree) -> Tree:
    """The values in the dtypes of the given tree."""
    return optree.tree_map(lambda v, g: v.to(g.dtype), values, given)


@factory
def average_parameters(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of the ranks' parameters, weighted; for `fuse(..., after=...)`.

        over="weight"   sum_r w_r p_r       / sum_r w_r
        over="live"     sum_r [w_r > 0] p_r / sum_r [w_r > 0]
        over="world"    sum_r p_r           / ranks

    The weight w_r is that of the steps since the last average: inside `every`, the sum over its window. A rank without
    input in the window gets the mean. Where no rank had input, nothing changes. Parameters in 16 bits travel as
    float32.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor.

    Returns:
        A `Transform` of parameters, equal on all ranks afterwards. It has no state.

    Raises:
        ValueError: `over` is none of the three; `axis` names none, or one twice.
        TypeError: `axis` is no name.
        UnboundAxis: at `update`: nothing binds `axis`.

    Same as: torch's model_averaging.utils.average_parameters, with over="world"; that one gives all parameters new
        memory.

    >>> from fjoin import transforms as tx
    >>> def one_rank(p, weight):
    ...     average = tx.average_parameters("data")
    ...     return average.update(p, average.init(p), weight=weight)[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    [tensor(2.), tensor(2.)]
    """
    reduce = WindowMean("average_parameters", mean(axis, over))

    def update(values: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        average, _, live = reduce(values, (), call)
        return trees.where(live, like(average, values), values), state

    return Transform(lambda params: (), update, Needs.NOTHING, facts=Facts(equalizes=axis))


StatePolicy: TypeAlias = Literal["keep", "average"]


@factory
def average_state(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of the ranks' optimizer states, weighted; for `fuse(..., on_state=...)`.

    Moments and other values of a parameter's elements are averaged, as by `average_parameters`. Step counts become the
    largest of all ranks, since a rank without input has taken fewer steps.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The weights of the ranks; see `average_parameters`.

    Returns:
        A `Transform` of a tree path -> name -> tensor. It has no state.

    Raises:
        TypeError: at `init`: a value that is no mean of anything: not floating-point, or a scalar that belongs to the
            step count, such as NAdam's `mu_product`.
        ValueError, UnboundAxis: as `average_parameters`.

    >>> from fjoin import transforms as tx
    >>> tx.fuse(tx.identity(), tx.adam(0.1), on_state=tx.every(4, tx.average_state("data"))).on_state
    every(4, average_state('data'))
    """
    reduce = WindowMean("average_state", mean(axis, over))

    def init(values: Tree) -> State:
        named = trees.named_leaves(values)
        whole = {_split(path)[0] for path, value in named.items() if value.dim()}
        for path, value in named.items():
            param, name = _split(path)
            if name != "step" and (not value.is_floating_point() or (param in whole and not value.dim())):
                raise TypeError(
                    f"average_state: {name!r} of the state of {param!r} ({value.dtype}, shape {tuple(value.shape)}) has no "
                    f"mean; choose others, as in on_state=masked(average_state(...), '*.exp_avg')"
                )
        return ()

    def update(values: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        named = trees.named_leaves(values)
        counts = {path: value for path, value in named.items() if _split(path)[1] == "step"}
        rest = {path: value for path, value in named.items() if path not in counts}
        average, _, live = reduce(rest, (), call)
        new = {**like(average, rest), **(pmax(counts, axis) if counts else {})}
        return trees.map_with_path(lambda path, old: trees.where(live, new[path], old), values), state

    return Transform(init, update, Needs.LEAVES | Needs.PATHS, facts=Facts(equalizes=axis))


def _split(path: str) -> tuple[str, str]:
    """The path of the parameter, and the name in its state."""
    param, _, name = path.rpartition(".")
    return param, name


def on_state_of(
    name: str, policy: StatePolicy, reduction: Transform, steps: int, first: int | None
) -> Transform | None:
    """The transform of the optimizer's state for a policy.

    Args:
        name: The factory, for errors.
        reduction: That of the parameters, whose axes and weights it takes.
        steps, first: The calls with an average of the parameters, as for `every`.
    """
    if policy not in ("keep", "average"):
        raise ValueError(f"{name}: state must be 'keep' or 'average', got {policy!r}; or use fuse(..., on_state=)")
    if policy == "keep":
        return None
    of = reduction.one_reduction
    if of is None:
        raise ValueError(f"{name}: state='average' needs one mean, got {reduction!r}; use fuse(..., on_state=)")
    return every(steps, average_state(of.axis, of.over or "weight"), first)
