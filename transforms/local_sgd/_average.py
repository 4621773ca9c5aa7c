"""Averages of the parameters over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .._check import AxisName, some_axes, whole_number
from ..axes._primitive import names
from ..combinators._chain import chain
from ..combinators._conditional import every
from ..reductions._mean import mean
from ..reductions._reduction import MeanState
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._transform import Needs, Transform
from ..transform._weights import Over, check_over
from ..tree._tree import Tree, where
from ._window import WindowMean, like


class AverageState(NamedTuple):
    hook: MeanState


@factory
def average_parameters(axis: AxisName, over: Over = "weight") -> Transform:
    """The mean of the ranks' parameters, weighted; for `fuse(..., after=...)`.

        over="weight"   sum_r w_r p_r       / sum_r w_r
        over="live"     sum_r [w_r > 0] p_r / sum_r [w_r > 0]
        over="world"    sum_r p_r           / ranks

    The weight w_r is that of the steps since the last average: inside `every`, the sum over its window. A rank without
    input in the window gets the mean. Where no rank had input, nothing changes. Parameters in 16 bits travel as float32.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor.

    Returns:
        A `Transform` of parameters, equal on all ranks afterwards. State: `AverageState(hook)`.

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
    some_axes("average_parameters", axis)
    reduce = WindowMean(mean(axis), over)

    def init(params: Tree) -> AverageState:
        return AverageState(mean(axis).init(params))

    def update(values: Tree, state: AverageState, params: Tree, call: Call) -> tuple[Tree, AverageState]:
        del params
        average, hook, live = reduce(values, state, call)
        return where(live, like(average, values), values), AverageState(hook)

    return Transform(
        init, update, Needs.NOTHING, equalizes=lambda state: state.hook.lane.get("weight", state.hook.total)
    )


@factory
def average_every(period: int, axis: AxisName, warmup_steps: int = 0, over: Over = "weight") -> Transform:
    """Averages the parameters over the ranks in every `period`-th step, from step `warmup_steps` on.

    It averages after the steps warmup_steps, warmup_steps + period, ..., counted from 0: the first time at the end of
    step `warmup_steps` itself.

    Args:
        period: The period in steps.
        axis: The axis, or a tuple of axes, to average over.
        warmup_steps: The steps before the first average.
        over: The weights of the ranks; see `average_parameters`. With "weight", those of the steps since the last
            average.

    Returns:
        A `Transform` for `fuse(..., after=...)`: `every(period, average_parameters(axis, over), first=warmup_steps)`.

    Raises:
        ValueError: `period` is no whole number from 1, `warmup_steps` none from 0; as `average_parameters`.
        TypeError, UnboundAxis: as `average_parameters`.

    Same as: PeriodicModelAverager, with over="world".

    >>> from fjoin import transforms as tx
    >>> tx.average_every(4, "data", warmup_steps=100)
    every(4, average_parameters('data'), first=100)
    """
    whole_number("average_every: period", period, 1)
    whole_number("average_every: warmup_steps", warmup_steps, 0)
    return every(period, average_parameters(axis, over), first=warmup_steps)


@factory
def hierarchical_average(periods: Mapping[int, AxisName], warmup_steps: int = 0, over: Over = "weight") -> Transform:
    """Averages the parameters over some axes often, and over more of them rarely.

    After step s, counted from 0 and at least `warmup_steps`, it averages over the axes of the largest period that
    divides s. An average over the outer axes weighs each rank by all its steps since the last such average; averages
    over the inner axes do not reset that weight.

    Args:
        periods: Period -> axes, for example {4: "local", 16: ("node", "local")}: each period a multiple of the one
            before, its axes those of the one before and others.
        warmup_steps: The steps before the first average.
        over: The weights of the ranks; see `average_parameters`.

    Returns:
        A `Transform` for `fuse(..., after=...)`.

    Raises:
        ValueError: no period, a period that is no multiple of the one before, or whose axes do not contain those of the
            one before; as `average_parameters`.
        TypeError: `periods` is no mapping; as `average_parameters`.

    Same as: HierarchicalModelAverager, with over="world".
    Source: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217, section 5.

    >>> from fjoin import transforms as tx
    >>> tx.hierarchical_average({2: "local", 8: ("node", "local")}).spec.name
    'chain'
    """
    whole_number("hierarchical_average: warmup_steps", warmup_steps, 0)
    check_over(over)
    if not isinstance(periods, Mapping):
        raise TypeError(f"hierarchical_average takes a mapping from periods to axes, got {periods!r}")
    if not periods:
        raise ValueError(
            "hierarchical_average needs at least one period, for example {4: 'local', 16: ('node', 'local')}"
        )
    levels = list(periods.items())
    for period, axis in levels:
        whole_number("hierarchical_average: a period", period, 1)
        some_axes("hierarchical_average", axis)
    for (inner, some), (outer, more) in zip(levels, levels[1:], strict=False):
        if outer <= inner or outer % inner:
            raise ValueError(
                f"hierarchical_average: the period {outer} must be a larger multiple of the one before, {inner}; or else two "
                f"averages would overlap"
            )
        if not set(names(some)) < set(names(more)):
            raise ValueError(
                f"hierarchical_average: the axes {more!r} of period {outer} must contain {some!r}, those of period {inner}, and "
                f"others"
            )
    larger = [*list(periods)[1:], None]
    return chain(
        *(
            every(period, average_parameters(axis, over), first=-(-warmup_steps // period) * period, except_every=outer)
            for (period, axis), outer in zip(periods.items(), larger, strict=True)
        )
    )
