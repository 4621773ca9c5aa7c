"""Local SGD, and post-local SGD."""

from __future__ import annotations

from ..base import Count, Index, Transform, factory
from ..combinators import chain, every as run_every, identity, switch_after
from ..optimizers import Optimizer, sgd
from ..pipelines import Pipeline, fuse
from ._average import StatePolicy, average_parameters, on_state_of
from ._diloco import outer_step


@factory
def local_sgd(
    inner: Optimizer, reduction: Transform, every: Count, *, state: StatePolicy = "keep", hook: Transform | None = None
) -> Pipeline:
    """Each rank trains alone; the parameters are averaged once in `every` steps.

    Args:
        inner: The optimizer of each rank.
        reduction: The average. `mean("data")` sends the parameters themselves; another one, such as
            `error_feedback(compress(int8(), mean("data")))` or `power_sgd("data")`, their changes since the last
            average. Its `over` weighs the ranks; see `average_parameters`.
        every: The period in steps; the first average comes at the end of the `every`-th step.
        state: The optimizer's state at an average: "keep" leaves each rank its own; "average" takes the mean.
        hook: A transform of each rank's gradients, such as `clip_by_global_norm(1.0)`, or a mean over other axes.

    Returns:
        A `Pipeline`: `fuse(identity(), inner, after=every(n, average_parameters(axis)))`, or with `outer_step`.

    Raises:
        ValueError: `every` is no whole number from 1; another argument out of range.
        TypeError: an argument of the wrong kind.

    Source: Stich, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767.

    >>> from fjoin import transforms as tx
    >>> pipeline = tx.local_sgd(tx.sgd(0.5), tx.mean("data"), every=2)
    >>> def one_rank(grads):
    ...     p = {"w": torch.tensor(0.0)}
    ...     state = pipeline.init(p)
    ...     for g in grads:
    ...         p, state = pipeline.step(p, {"w": torch.tensor(g)}, state)
    ...     return p["w"]
    >>> tx.simulate(one_rank, {"data": 2}, [[1.0, 1.0], [3.0, 3.0]])
    [tensor(-2.), tensor(-2.)]
    """
    after = _averages(reduction, every, None)
    on_state = on_state_of("local_sgd", state, reduction, every, None)
    return fuse(identity() if hook is None else hook, inner, after, on_state)


@factory
def post_local_sgd(
    inner: Optimizer,
    reduction: Transform,
    every: Count,
    warmup_steps: Index,
    *,
    hook: Transform | None = None,
    local: Transform | None = None,
    state: StatePolicy = "keep",
    then: Transform | None = None,
) -> Pipeline:
    """The mean of the gradients over all ranks for the first steps, then local SGD.

    From step `warmup_steps` on, counted from 0, the parameters are averaged: at the end of the steps warmup_steps,
    warmup_steps + every, ... Of several axes, gradients may still be averaged over some, and parameters over the
    others: `post_local_sgd(inner, mean("node"), 4, 100, hook=mean(("node", "local")), local=mean("local"))`.

    Args:
        inner: The optimizer of each rank.
        reduction: The average of the parameters, as for `local_sgd`.
        every: The period of the averages in steps.
        warmup_steps: The number of steps with the mean of all gradients.
        hook: The reduction of the gradients in these steps; by default `reduction`, also its codec.
        local: The reduction of the gradients afterwards; by default none. With it also `hook` must be given.
        state: As for `local_sgd`.
        then: A transform of the averaged gradients, such as `clip_by_global_norm(1.0)`.

    Returns:
        A `Pipeline`.

    Raises:
        ValueError: `local` without `hook`, which must reduce over its axes too.
        ValueError, TypeError: as `local_sgd`.

    Same as: post_localSGD_hook and PeriodicModelAverager in a PostLocalSGDOptimizer, with over="world", for one value
        of `warmup_steps` in place of two.
    Source: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217.

    >>> from fjoin import transforms as tx
    >>> tx.post_local_sgd(tx.sgd(0.1), tx.mean("data"), every=4, warmup_steps=100).hook
    switch_after(100, mean('data'), identity())
    """
    if local is not None and hook is None:
        raise ValueError("post_local_sgd: with local= give also hook=, the mean of all gradients in the first steps")
    gradients = switch_after(warmup_steps, hook or reduction, local or identity())
    after = switch_after(warmup_steps, identity(), _averages(reduction, every, 0))
    on_state = on_state_of("post_local_sgd", state, reduction, every, 0)
    if on_state is not None:
        on_state = switch_after(warmup_steps, identity(), on_state)
    return fuse(chain(gradients, *(() if then is None else (then,))), inner, after, on_state)


def _averages(reduction: Transform, every: int, first: int | None) -> Transform:
    """The averages of the parameters; by other reductions than a plain mean, of their changes since the last one."""
    of = reduction.facts.reduces
    if of is not None and of.fusable and not of.scatters and of.over is not None:
        return run_every(every, average_parameters(of.axis, of.over), first)
    return outer_step(reduction, sgd(1.0), every, first)
