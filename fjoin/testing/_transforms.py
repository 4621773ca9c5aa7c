"""The laws of transforms, on whole trees and in buckets."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import transforms as tx
from ..transforms.base import Call, Needs, timings, trees
from ..transforms.pipelines import takes_flat
from ._compare import grads_of, max_diff, on_ranks, params_like, ranks_of, repeated, same_bits, saved_and_loaded


def keeps_to_its_needs(make: Callable[[], tx.Transform]) -> None:
    """Without LEAVES, PATHS and TREE a flat buffer may stand for the tree; without LAYOUT and TREE any subset of the
    leaves.
    """

    def one_rank(part: tx.Transform, params: Any, me: int) -> None:
        grads = grads_of(me)

        def result(pick: Callable[[Any], Any]) -> Any:
            return part.update(pick(grads), part.init(pick(params)), pick(params), weight=2.0)[0]

        if (out := result(lambda tree: tree)) is None:
            return
        if takes_flat(part):
            flat = _ravel(tuple(sorted(grads)))  # in the order of a tree's leaves
            assert max_diff(result(flat), flat(out)) == 0, "the flat buffer gave another answer"
        if not part.needs & (Needs.LAYOUT | Needs.TREE):
            for path in grads:
                if _serves(part, path):
                    one = _part((path,))
                    assert max_diff(result(one), one(out)) == 0, f"{path} alone gave another answer"

    on_ranks(make, one_rank)


BUCKETS = (("scale", "layer.bias"), ("layer.weight", "none"))


def goes_bucket_by_bucket(make: Callable[[], tx.Transform]) -> None:
    """Calls bucket by bucket equal one call on the whole tree, and agree on the common part of the state."""

    def one_rank(part: tx.Transform, params: Any, me: int) -> None:
        whole = part.init(params)
        layout = Needs.LAYOUT in part.needs
        flat = takes_flat(part) and not layout
        picks = [(_ravel if flat else _part)(paths) for paths in BUCKETS]
        states = [
            part.init(pick(params)) if flat else trees.restrict(whole, params, paths)
            for pick, paths in zip(picks, BUCKETS, strict=True)
        ]
        for step in range(3):
            grads, weight = grads_of(10 * step + me), float(me)
            out, whole = part.update(grads, whole, params, weight=weight)
            call = Call(weight)  # one for all buckets: their weights are summed once
            for i, pick in enumerate(picks):
                one, states[i] = part.run(pick(grads), states[i], pick(params), call)
                assert (one is None) == (out is None)
                assert out is None or layout or same_bits(one, pick(out)), "a bucket alone gave another answer"
            if layout:  # codes depend on the layout
                agree = same_bits(trees.merge(states, params), trees.merge(states[::-1], params))
                assert agree, "the buckets do not agree"
            elif not flat:
                for order in (states, states[::-1]):
                    merged = trees.merge(order, params)
                    assert same_bits(merged, whole), "the buckets' states are not the state of the whole"

    if Needs.TREE not in make().needs:
        on_ranks(make, one_rank)


def _ravel(paths: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda tree: {"": torch.cat([tree[path].reshape(-1) for path in paths])}


def _part(paths: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda tree: {path: tree[path] for path in paths}


def _serves(part: tx.Transform, path: str) -> bool:
    """Whether a transform by path can be set up for this path alone."""
    try:
        part.init({path: params_like()[path]})
    except ValueError:
        return False
    return True


def is_pure(make: Callable[[], tx.Transform]) -> None:
    """A repeated call gives the same result, and its arguments stay unchanged."""
    _walk(make, lambda part, update, *given: repeated(update, *given))


def resumes(make: Callable[[], tx.Transform]) -> None:
    """Saved to a file and loaded again, the state gives the same next step to the bit."""

    def both(part: tx.Transform, update: Any, grads: Any, state: Any, params: Any) -> Any:
        first = update(grads, state, params)
        other = update(grads, saved_and_loaded(state, part.init(params)), params)
        assert same_bits(first, other), "the state that was loaded went another way"
        return first

    _walk(make, both)


def _walk(make: Callable[[], tx.Transform], step: Callable[..., Any]) -> None:
    """Some steps by `step(transform, update, grads, state, params) -> (grads, state)`, on one rank and on several."""

    def one_rank(part: tx.Transform, params: Any, me: int) -> None:
        state = part.init(params)
        for i in range(4):
            update = functools.partial(part.update, weight=weight_of(i, me))
            _, state = step(part, update, grads_of(10 * i + me), state, params)

    for alone in (True, False):
        on_ranks(make, one_rank, alone)


def weight_of(step: int, rank: int) -> Any:
    """A weight as a number, a tensor or None; each rank is without input in some steps."""
    weights = (2.0, torch.tensor(3.0, dtype=torch.float64), 0.0, None, torch.tensor(0.0, dtype=torch.float64))
    return weights[(step + 2 * rank) % len(weights)]


def chains(make: Callable[[], tx.Transform]) -> None:
    """In a chain it gives the same results as alone."""

    def one_rank(part: tx.Transform, params: Any, me: int) -> None:
        other = tx.clip_by_value(0.5)
        both = tx.chain(part, other)
        a, _ = both.update(grads_of(me), both.init(params), params, weight=1.0)
        b, _ = part.update(grads_of(me), part.init(params), params, weight=1.0)
        assert a is b is None or max_diff(a, other.update(b, (), params)[0]) == 0

    on_ranks(make, one_rank)


def ignores_weight_zero(make: Callable[[], tx.Transform]) -> None:
    """Values of a rank of weight 0, even NaN, change nothing on the others; with a reduction, nor in later steps."""

    def run(poison: bool) -> Any:
        def one_rank(part: tx.Transform, params: Any, me: int) -> Any:
            state, outs = part.init(params), []
            for step in range(4 if timings.reduced_over(part) else 1):
                grads, idle = grads_of(10 * step + me), me == 1 and step % 2 == 0
                if idle and poison:
                    grads = _nan(grads)
                out, state = part.update(grads, state, params, weight=0.0 if idle else 2.0)
                if not idle:
                    outs.append(out)
            return outs

        return on_ranks(make, one_rank)

    assert same_bits(run(False), run(True)), "a rank of weight 0 was heard"


def _nan(grads: Any) -> Any:
    return {path: torch.full_like(g, math.nan) for path, g in grads.items()}


def is_itself_alone(make: Callable[[], tx.Transform]) -> None:
    """On an axis of one rank a mean returns the gradients, and a sum returns them times the weight."""
    reduces = make().facts.reduces
    if reduces is None:
        return

    def one_rank(part: tx.Transform, params: Any, me: int) -> Any:
        return part.update(grads_of(me), part.init(params), params, weight=2.0)[0]

    (out,) = on_ranks(make, one_rank, alone=True)
    times = 2.0 if reduces.over is None else 1.0
    assert max_diff(out, {path: times * g for path, g in grads_of(0).items()}) < 1e-6, "it gave something else"


def forgets_the_order_of_ranks(make: Callable[[], tx.Transform]) -> None:
    """A mean or a sum gives the same result when the ranks are permuted, unless it rounds stochastically."""
    if make().facts.reduces is None or _holds(make(), lambda part: isinstance(part, tx.Codec) and part.stochastic):
        return

    def run(shift: int) -> Any:
        def one_rank(part: tx.Transform, params: Any, me: int) -> Any:
            who = (me + shift) % ranks_of(make)
            return part.update(grads_of(who), part.init(params), params, weight=1.0 + who)[0]

        ranks = on_ranks(make, one_rank)
        assert all(same_bits(ranks[0], other) for other in ranks), "ranks got different results"
        return ranks[0]

    room = 0.1 if make().facts.compression else 1e-14  # where the sums are encoded, about one step of the code
    assert max_diff(run(0), run(-1)) < room


def _holds(part: Any, what: Callable[[Any], bool]) -> bool:
    return what(part) or any(_holds(child, what) for child in part.spec.children)


def forgets_what_is_not_finite(make: Callable[[], tx.Transform]) -> None:
    """A lossy transform does not remember a step that is not finite."""

    def one_rank(part: tx.Transform, params: Any, me: int) -> None:
        state, bad = part.init(params), False
        for step in range(6):
            grads = grads_of(10 * step + me)
            if step in (1, 4) and me == 1:
                grads = _nan(grads)
            out, state = part.update(grads, state, params, weight=1.0)
            bad = bad or step in (1, 4)
            if out is not None:  # the end of a window, which may include a step that is not finite
                fine = all(torch.isfinite(leaf).all() for leaf in out.values())
                assert fine or bad, f"step {step} is not finite, as steps before it"
                bad = False

    if make().facts.compression is not None:
        on_ranks(make, one_rank)
