"""The laws of transforms.

Each law is a function whose argument makes a transform. It raises AssertionError where the law is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import transforms as tx
from ._buckets import goes_bucket_by_bucket, keeps_to_its_needs
from ._compare import assert_untouched, max_diff, params_like, same_bits, snapshot
from ._data import is_data
from ._devices import stays_on_its_device
from ._ranks import axes_for, grads_of, on_ranks, rank_in, ranks_of
from ._saving import saved_and_loaded


def is_pure(make: Callable[[], tx.Transform]) -> None:
    """A repeated call gives the same result, and its arguments stay unchanged."""

    def one_rank() -> None:
        part, params, me = make(), params_like(), rank_in(make)
        state = part.init(params)
        for step in range(4):
            grads, weight = grads_of(10 * step + me), weight_of(step, me)
            given = (grads, state, params)
            before = snapshot(given)
            first = part.update(grads, state, params, weight=weight)
            second = part.update(grads, state, params, weight=weight)
            assert_untouched(given, before)
            assert same_bits(first, second), "the second call gave another answer: there is hidden state"
            state = first[1]

    for alone in (True, False):
        tx.simulate(one_rank, axes_for(make, alone))


def weight_of(step: int, rank: int) -> Any:
    """A weight as a number, a tensor or None; each rank is without input in some steps."""
    weights = (2.0, torch.tensor(3.0, dtype=torch.float64), 0.0, None, torch.tensor(0.0, dtype=torch.float64))
    return weights[(step + 2 * rank) % len(weights)]


def chains(make: Callable[[], tx.Transform]) -> None:
    """In a chain it gives the same results as alone."""

    def one_rank() -> None:
        part, other, params = make(), tx.clip_by_value(0.5), params_like()
        both = tx.chain(part, other)
        grads = grads_of(rank_in(make))
        a, _ = both.update(grads, both.init(params), params, weight=1.0)
        b, _ = part.update(grads, part.init(params), params, weight=1.0)
        if b is None:
            assert a is None
        else:
            assert max_diff(a, other.update(b, (), params)[0]) == 0

    tx.simulate(one_rank, axes_for(make))


def ignores_weight_zero(make: Callable[[], tx.Transform]) -> None:
    """Values of a rank of weight 0, even NaN, change nothing on the others; with a reduction, nor in later steps."""

    def run(poison: bool) -> Any:
        def one_rank() -> Any:
            part, params, me = make(), params_like(), rank_in(make)
            state, outs = part.init(params), []
            for step in range(4 if part.sums else 1):
                grads, idle = grads_of(10 * step + me), me == 1 and step % 2 == 0
                if idle and poison:
                    grads = {path: torch.full_like(g, float("nan")) for path, g in grads.items()}
                out, state = part.update(grads, state, params, weight=0.0 if idle else 2.0)
                if not idle:
                    outs.append(out)
            return outs

        return tx.simulate(one_rank, axes_for(make))

    for clean, poisoned in zip(run(False), run(True), strict=True):
        assert same_bits(clean, poisoned), "a rank of weight 0 was heard"


def is_itself_alone(make: Callable[[], tx.Transform]) -> None:
    """On an axis of one rank a mean returns the gradients, and a sum returns them times the weight."""
    part = make()
    if not part.sums:
        return
    (((out,), state),) = on_ranks(make, [2.0], steps=1)
    if out is None:
        return
    assert part.sums(state).total.item() in (1.0, 2.0), "it has counted another weight"
    if part.reduces is not None and _axis_of(part) is not None:
        times = 2.0 if part.reduces.over is None else 1.0
        assert max_diff(out, {path: times * g for path, g in grads_of(0).items()}) < 1e-6, "it gave something else"


def forgets_the_order_of_ranks(make: Callable[[], tx.Transform]) -> None:
    """A mean or a sum gives the same result when the ranks are permuted, unless it rounds stochastically."""
    if _axis_of(make()) is None or _holds(make(), lambda part: isinstance(part, tx.Codec) and part.stochastic):
        return
    order = list(range(ranks_of(make)))

    def run(order: list[int]) -> Any:
        def one_rank(who: int) -> Any:
            part, params = make(), params_like()
            out, _ = part.update(grads_of(who), part.init(params), params, weight=1.0 + who)
            return out

        ranks = tx.simulate(one_rank, axes_for(make), order)
        assert all(same_bits(ranks[0], other) for other in ranks), "ranks got different results"
        return ranks[0]

    assert max_diff(run(order), run(order[-1:] + order[:-1])) < _room(make())


def _axis_of(part: tx.Transform) -> Any:
    """The axis of a mean or a sum; None for any other transform."""
    return part.reduces.axis if part.reduces else None


def _room(part: tx.Transform) -> float:
    """The tolerance for another order of additions: where their results are encoded, about one step of the code."""
    return 0.1 if part.compression else 1e-14


def _holds(part: Any, what: Callable[[Any], bool]) -> bool:
    return what(part) or any(_holds(child, what) for child in part.spec.children)


def forgets_what_is_not_finite(make: Callable[[], tx.Transform]) -> None:
    """A lossy transform does not remember a step that is not finite."""
    if make().compression is None:
        return
    params = params_like()

    def one_rank() -> None:
        part, me = make(), rank_in(make)
        state, bad = part.init(params), False
        for step in range(6):
            grads = grads_of(10 * step + me)
            if step in (1, 4) and me == 1:
                grads = {path: torch.full_like(g, float("nan")) for path, g in grads.items()}
            out, state = part.update(grads, state, params, weight=1.0)
            bad = bad or step in (1, 4)
            if out is not None:  # the end of a window, which may include a step that is not finite
                fine = all(torch.isfinite(leaf).all() for leaf in out.values())
                assert fine or bad, f"step {step} is not finite, as steps before it"
                bad = False

    tx.simulate(one_rank, axes_for(make))


def resumes(make: Callable[[], tx.Transform]) -> None:
    """Saved to a file and loaded again, the state gives the same next step to the bit."""

    def one_rank() -> None:
        part, params, me = make(), params_like(), rank_in(make)
        state = part.init(params)
        for step in range(4):
            grads, weight = grads_of(10 * step + me), weight_of(step, me)
            loaded = saved_and_loaded(state, like=part.init(params))
            a = part.update(grads, state, params, weight=weight)
            assert same_bits(a, part.update(grads, loaded, params, weight=weight)), (
                f"it went another way in step {step}"
            )
            state = a[1]

    for alone in (True, False):
        tx.simulate(one_rank, axes_for(make, alone))


TRANSFORM_LAWS: list[Callable[..., None]] = [
    is_pure,
    keeps_to_its_needs,
    goes_bucket_by_bucket,
    chains,
    ignores_weight_zero,
    is_itself_alone,
    forgets_the_order_of_ranks,
    forgets_what_is_not_finite,
    resumes,
    stays_on_its_device,
    is_data,
]
