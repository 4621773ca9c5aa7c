"""The laws of transforms, on whole trees and in buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import transforms as tx
from ..transforms.base import BucketSums, Call, Needs, merge, restrict
from ..transforms.pipelines import takes_flat
from ._compare import (
    assert_untouched,
    axes_for,
    grads_of,
    is_data,
    max_diff,
    on_ranks,
    params_like,
    rank_in,
    ranks_of,
    same_bits,
    saved_and_loaded,
    snapshot,
)
from ._devices import stays_on_its_device


def keeps_to_its_needs(make: Callable[[], tx.Transform]) -> None:
    """Without LEAVES, PATHS and TREE a flat buffer may stand for the tree; without LAYOUT and TREE any subset of the leaves."""

    def one_rank() -> None:
        part, params = make(), params_like()
        grads = grads_of(rank_in(make))
        out, _ = part.update(grads, part.init(params), params, weight=2.0)
        if out is None:
            return
        if takes_flat(part):
            paths = tuple(sorted(grads))  # the order of a tree's leaves
            one = _ravel(params, paths)
            flat, _ = part.update(_ravel(grads, paths), part.init(one), one, weight=2.0)
            assert max_diff(flat, _ravel(out, paths)) == 0, "the flat buffer gave another answer"
        if not part.needs & (Needs.LAYOUT | Needs.TREE):
            for path in grads:
                if not _serves(part, path):
                    continue
                one, _ = part.update(
                    {path: grads[path]}, part.init({path: params[path]}), {path: params[path]}, weight=2.0
                )
                assert max_diff(one, {path: out[path]}) == 0, f"{path} alone gave another answer"

    tx.simulate(one_rank, axes_for(make))


BUCKETS = (("scale", "layer.bias"), ("layer.weight", "none"))


def goes_bucket_by_bucket(make: Callable[[], tx.Transform]) -> None:
    """Calls bucket by bucket equal one call on the whole tree, and agree on the common part of the state."""

    def one_rank() -> None:
        part, params = make(), params_like()
        if Needs.TREE in part.needs:
            return
        rank = rank_in(make)
        whole = part.init(params)
        layout = Needs.LAYOUT in part.needs
        flat = takes_flat(part) and not layout
        states = [part.init(_ravel(params, paths)) if flat else restrict(whole, params, paths) for paths in BUCKETS]
        for step in range(3):
            grads, weight = grads_of(10 * step + rank), float(rank)
            out, whole = part.update(grads, whole, params, weight=weight, lane={"x": 1.0})
            outs: list[Any] = []
            first: BucketSums | None = None
            for i, paths in enumerate(BUCKETS):
                pick = (
                    (lambda tree, p=paths: _ravel(tree, p)) if flat else (lambda tree, p=paths: {k: tree[k] for k in p})
                )
                sums = BucketSums(torch.float32, first)
                call = Call(weight, {"x": 1.0}).inside(sums=sums)
                one, states[i] = part.run(pick(grads), states[i], pick(params), call)
                first = first or sums
                assert (one is None) == (out is None)
                if out is not None and not layout:
                    assert same_bits(one, pick(out)), "a bucket alone gave another answer"
                    outs.append(one)
            if layout:  # codes depend on the layout
                assert same_bits(merge(states, params), merge(states[::-1], params)), "the buckets do not agree"
            elif not flat:
                for order in (states, states[::-1]):
                    assert same_bits(merge(order, params), whole), "the buckets' states are not the state of the whole"

    tx.simulate(one_rank, axes_for(make))


def _ravel(tree: Any, paths: tuple[str, ...]) -> Any:
    return {"": torch.cat([tree[path].reshape(-1) for path in paths])}


def _serves(part: tx.Transform, path: str) -> bool:
    """Whether a transform by path can be set up for this path alone."""
    try:
        part.init({path: params_like()[path]})
    except ValueError:
        return False
    return True


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
