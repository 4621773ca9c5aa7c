"""Local SGD, and post-local SGD."""

from __future__ import annotations

from ..axes import names
from ..base import AxisName, Over, Transform, check_transform, factory, some_axes, whole_number
from ..codecs import Codec
from ..combinators import chain, every as run_every, identity, switch_after
from ..optimizers import Optimizer, sgd
from ..pipelines import Pipeline, fuse
from ..reductions import mean, noop
from ._average import StatePolicy, average_parameters, on_state_of, reduction
from ._diloco import outer_step


@factory
def local_sgd(
    inner: Optimizer,
    axis: AxisName,
    every: int,
    *,
    over: Over = "weight",
    wire: Codec | Transform | None = None,
    state: StatePolicy = "keep",
    hook: Transform | None = None,
) -> Pipeline:
    """Each rank trains alone; the parameters are averaged once in `every` steps.

    Args:
        inner: The optimizer of each rank.
        axis: The axis, or a tuple of axes, to average over.
        every: The period in steps; the first average comes at the end of the `every`-th step.
        over: The weights of the ranks; see `average_parameters`.
        wire: Sends the changes of the parameters since the last average, encoded by this codec with error feedback, or
            by a reduction of its own, such as `power_sgd`. None: sends the parameters themselves.
        state: The optimizer's state at an average: "keep" leaves each rank its own; "average" takes the mean.
        hook: A transform of each rank's gradients, such as `clip_by_global_norm(1.0)`, or a mean over other axes.

    Returns:
        A `Pipeline`: `fuse(noop(), inner, after=every(n, average_parameters(axis)))`, and so on for other arguments.

    Raises:
        ValueError: `every` is no whole number from 1; a wire that does not reduce over `axis`; another argument out of
            range.
        TypeError: an argument of the wrong kind.

    Source: Stich, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.local_sgd(tx.sgd(0.5), "data", every=2)
    >>> def one_rank(grads):
    ...     p = {"w": torch.tensor(0.0)}
    ...     state = pipeline.init(p)
    ...     for g in grads:
    ...         p, state = pipeline.step(p, {"w": torch.tensor(g)}, state)
    ...     return p["w"]
    >>> tx.simulate(one_rank, {"data": 2}, [[1.0, 1.0], [3.0, 3.0]])
    [tensor(-2.), tensor(-2.)]
    """
    whole_number("local_sgd: every", every, 1)
    after = _averages("local_sgd", axis, every, None, over, wire)
    on_state = on_state_of("local_sgd", state, axis, every, None, over)
    return fuse(noop() if hook is None else hook, inner, after, on_state)


@factory
def post_local_sgd(
    inner: Optimizer,
    axis: AxisName,
    every: int,
    warmup_steps: int,
    *,
    local: AxisName | None = None,
    over: Over = "weight",
    wire: Codec | Transform | None = None,
    state: StatePolicy = "keep",
    then: Transform | None = None,
) -> Pipeline:
    """The mean of the gradients over all ranks for the first steps, then local SGD.

    From step `warmup_steps` on, counted from 0, gradients are averaged over `local` only, or not at all, and the
    parameters over the other axes: at the end of the steps warmup_steps, warmup_steps + every, ...

    Args:
        inner: The optimizer of each rank.
        axis: The axis, or a tuple of axes, of all ranks.
        every: The period of the averages in steps.
        warmup_steps: The number of steps with the mean of all gradients.
        local: The axes, among those of `axis`, over which gradients are averaged in all steps.
        over: The weights of the ranks, in means of gradients and of parameters; see `average_parameters`.
        wire: As for `local_sgd`; for the averages of the parameters only.
        state: As for `local_sgd`.
        then: A transform of the averaged gradients, such as `clip_by_global_norm(1.0)`.

    Returns:
        A `Pipeline`.

    Raises:
        ValueError: `local` is not a part of `axis`; as `local_sgd`.
        TypeError: as `local_sgd`.

    Same as: post_localSGD_hook and PeriodicModelAverager in a PostLocalSGDOptimizer, with over="world", for one value
        of `warmup_steps` in place of two.
    Source: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217.

    >>> from fjoin import transforms as tx
    >>> tx.post_local_sgd(tx.sgd(0.1), "data", every=4, warmup_steps=100).hook
    switch_after(100, mean('data'), noop())
    """
    whole_number("post_local_sgd: every", every, 1)
    whole_number("post_local_sgd: warmup_steps", warmup_steps, 0)
    rest = outer_axes("post_local_sgd", axis, local)
    gradients = switch_after(warmup_steps, mean(axis, over), noop() if local is None else mean(local, over))
    after = switch_after(warmup_steps, identity(), _averages("post_local_sgd", rest, every, 0, over, wire))
    on_state = on_state_of("post_local_sgd", state, rest, every, 0, over)
    if on_state is not None:
        on_state = switch_after(warmup_steps, identity(), on_state)
    return fuse(
        chain(gradients, *(() if then is None else (check_transform(then, "post_local_sgd: then"),))),
        inner,
        after,
        on_state,
    )


def _averages(
    name: str, axis: AxisName, every: int, first: int | None, over: Over, wire: Codec | Transform | None
) -> Transform:
    """The averages of the parameters; with a wire, of their changes since the last one."""
    if wire is None:
        return run_every(every, average_parameters(axis, over), first)
    return outer_step(reduction(name, axis, wire), sgd(1.0), every, first, over=over)


def outer_axes(name: str, axis: AxisName, local: AxisName | None) -> AxisName:
    """The axes of `axis` without those of `local`.

    Raises:
        ValueError: `local` is not a part of `axis`, or all of it.
    """
    some_axes(name, axis)
    if local is None:
        return axis
    some_axes(name, local)
    rest = tuple(one for one in names(axis) if one not in names(local))
    if not set(names(local)) <= set(names(axis)) or not rest:
        raise ValueError(f"{name}: local={local!r} must be some of the axes {axis!r}, but not all")
    return rest if len(rest) > 1 else rest[0]
