"""A transform that changes the weight changes the shares and the divisor of the reduction inside, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.changed_weights import ALL, CHANGES, MEANS, MOST, WEIGHTS, axes_for, by_hand, values, with_weights
from tests.helpers import max_diff, same_bits

RANKS = [0, 1, 2, 3]


def outs(hook: tx.Transform, rank: int, weight: Any) -> Any:
    """The results of two calls, and the state."""
    params = {"w": torch.zeros(4, 2, dtype=torch.float64)}
    state, found = hook.init(params), []
    for step in range(2):
        grads = {"w": values(rank, step).view(4, 2)}
        out, state = hook.update(grads, state, params, weight=weight, step=step)
        found.append(out)
    return found, state


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", MOST)
@pytest.mark.parametrize("name", ALL)
def test_a_wrapper_that_changes_weights_changes_the_divisor(name: str, change: str) -> None:
    """It is the reduction on the changed weights, results and states; that of a mean or a sum is plain arithmetic."""
    make, function = ALL[name], CHANGES[change]
    wrapped = with_weights(function, make())
    got = tx.simulate(lambda rank, weight: outs(wrapped, rank, weight), axes_for(name), RANKS, WEIGHTS)
    want = tx.simulate(lambda rank, weight: outs(make(), rank, function(weight)), axes_for(name), RANKS, WEIGHTS)
    for (seen, state), (expected, other) in zip(got, want, strict=True):
        assert same_bits(seen, expected) and same_bits(state.inner, other)
        if name not in MEANS:
            continue
        over, shares = MEANS[name][1], [function(w) for w in WEIGHTS]
        for step, out in enumerate(seen):
            by_formula = by_hand(shares, over, [values(rank, step) for rank in RANKS])
            torch.testing.assert_close(out["w"].flatten(), by_formula, rtol=1e-6, atol=1e-6)


def test_the_change_ends_with_the_wrapper() -> None:
    """Roots 1, 3 and 2, 0 of weights 1, 9 and 4, 0 inside the nodes; these count by their own weights, 10 and 4."""
    hook = tx.chain(with_weights(CHANGES["root"], tx.mean("local")), tx.mean("node"))

    def one_rank(gradient: float, weight: float) -> float:
        g = torch.tensor(gradient, dtype=torch.float64)
        return hook.update(g, hook.init(g), weight=weight)[0].item()

    found = tx.simulate(one_rank, {"node": 2, "local": 2}, [0.0, 4.0, 8.0, 5.0], [1.0, 9.0, 4.0, 0.0])
    assert found == pytest.approx([(10 * 3.0 + 4 * 8.0) / 14] * 4)


@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_pieces_of_a_mean(over: Any) -> None:
    """Each rank gets the numbers that it owns."""
    for function in CHANGES.values():
        hook = with_weights(function, tx.scatter_mean("data", over))

        def one_rank(rank: int, weight: float) -> Any:
            grads = {"w": torch.cat([values(rank)] * 8)}
            return hook.update(grads, hook.init(grads), grads, weight=weight)[0]["w"]  # noqa: B023

        want = by_hand([function(w) for w in WEIGHTS], over, [values(rank) for rank in RANKS]).repeat(8)
        found = torch.cat(tx.simulate(one_rank, {"data": 4}, RANKS, WEIGHTS))
        assert max_diff(found, want) < 1e-12
