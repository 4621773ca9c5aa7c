"""Error feedback: nothing is lost forever; ranks without input send their residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.base import Call
from fjoin.transforms.base.trees import restrict
from tests.helpers import max_diff, same_bits
from tests.power_problem import made


def test_a_rank_without_input_sends_its_residual() -> None:
    """Two ranks; the second has input only in the first step. Of the mean each has left out 0.2, half of its 0.4."""
    first = torch.tensor([127.0, 0.4])

    def one_rank() -> Any:
        hook = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
        rank = int(tx.axis_index("data"))
        _, state = hook.update(first, hook.init(first), weight=1.0)
        residual = state.error[""].clone()
        out, state = hook.update(torch.zeros(2), state, weight=1.0 - rank)
        return residual.tolist(), out.tolist(), state.error[""].tolist()

    for residual, out, left in tx.simulate(one_rank, {"data": 2}):
        assert residual == pytest.approx([0.0, 0.2]) and out == pytest.approx([0.0, 0.4], abs=0.01)
        assert left == pytest.approx([0.0, 0.0], abs=0.01)


# The weights of two ranks, step by step.
WEIGHTS: dict[str, list[tuple[float, float]]] = {
    "all shrink once": [(w, w) for w in [256.0] * 6 + [2.0] + [256.0] * 3],
    "one shrinks once": [(w, 256.0) for w in [256.0] * 6 + [2.0] + [256.0] * 3],
    "one grows once": [(w, 256.0) for w in [2.0] * 6 + [256.0] + [2.0] * 3],
    "one comes back with less": [(w, 256.0) for w in [256.0] * 6 + [0.0] + [2.0] * 4],
    "one comes back when all have less": [(256.0, 256.0)] * 6 + [(0.0, 256.0)] * 2 + [(2.0, 2.0)] * 3,
    "one is away while the other has more": [(1.0, 1.0)] * 6 + [(0.0, 256.0)] + [(1.0, 1.0)] * 3,
    "one has more now and then": [(1.0, 2.0 if step % 2 else 256.0) for step in range(20)],
    "one has input now and then": [(1.0, 4.0 * (step % 2)) for step in range(20)],
    "both at random": [(1.5 ** (7 * step % 11), 1.5 ** (5 * step % 13)) for step in range(40)],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("how", ["error_feedback", "power_sgd"])
def test_residuals_are_bounded_when_weights_change(how: str, weights: str) -> None:
    """A result is at most as large as if each residual had been sent with its own batch."""
    encoded, matrix = tx.compress(tx.top_k(0.1), tx.mean("data")), tx.power_sgd("data", 2, min_compression_rate=1.0)
    hook: tx.Transform = {
        "error_feedback": tx.error_feedback(encoded), "power_sgd": tx.error_feedback(matrix),
    }[how]  # fmt: skip

    def one_rank(rank: int) -> Any:
        state, ratios, gap = hook.init(torch.zeros(20, 20)), [], torch.zeros(20, 20)
        for step, both in enumerate(WEIGHTS[weights]):
            grads = [torch.randn(20, 20, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
            mean = (both[0] * grads[0] + both[1] * grads[1]) / sum(both)
            out, state = hook.update(grads[rank], state, weight=both[rank])
            ratios.append(float(out.norm() / mean.norm()))
            gap += mean - out
        return ratios, gap, state.error[""]

    (ratios, gap, residual), (_, _, other) = tx.simulate(one_rank, {"data": 2}, [0, 1])
    assert max(ratios) < 2
    assert max_diff(residual + other, gap) < 1e-4


def test_only_encoded_leaves_have_residuals() -> None:
    by_path = tx.partition({"*.bias": tx.mean("data"), "*": tx.chain(tx.compress(tx.int8(), tx.mean("data")))})
    params = {"a.bias": torch.zeros(3), "a.weight": torch.zeros(2, 2, dtype=torch.float64)}
    for hook in (by_path, tx.every(2, by_path), tx.switch_after(2, tx.mean("data"), by_path)):
        error = tx.error_feedback(hook).init(params).error
        assert list(error) == ["a.weight"] and error["a.weight"].dtype is torch.float64
    assert list(tx.error_feedback(tx.masked(tx.compress(tx.int8(), tx.mean("data")), "*.bias")).init(params).error) == [
        "a.bias"
    ]


def test_a_feedback_for_each_of_two_means_loses_nothing() -> None:
    apart = tx.chain(*(tx.error_feedback(tx.compress(tx.int4(), tx.mean(axis))) for axis in ("local", "node")))

    def one_rank(g: Tensor) -> Tensor:
        state, total = apart.init(g), torch.zeros(40)
        for _ in range(200):
            out, state = apart.update(g, state)
            total = total + out
        return total / 200

    xs = [torch.randn(40, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    for out in tx.simulate(one_rank, {"node": 2, "local": 2}, xs):
        assert max_diff(out, torch.stack(xs).mean(0)) < 0.01


# Leaves, of which some are not encoded, or do not fill cache lines.
ODD = {"a": (37, 53), "b": (53, 37), "c": (37, 53), "d": (5, 3, 7), "e": (64, 33), "f": (11,), "g": (3,), "h": (37, 53)}
IN_BUCKETS = {
    "bfloat16": tx.partition({("f", "h"): tx.mean("data"), "*": tx.compress(tx.bfloat16(), tx.mean("data"))}),
    **{f"power_sgd, {rank}": made(rank, over="world") for rank in (1, 2, 8)},
}


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_buckets_equal_the_whole(name: str) -> None:
    def one_rank(rank: int) -> None:
        hook, g = tx.error_feedback(IN_BUCKETS[name]), torch.Generator().manual_seed(rank)
        params = {path: torch.zeros(shape) for path, shape in ODD.items()}
        whole, buckets = hook.init(params), (["h", "f"], ["b"], ["a", "c", "d", "e", "g"])
        states = [restrict(whole, params, paths) for paths in buckets]
        for step in range(4):
            grads = {path: torch.randn(shape, generator=g) for path, shape in ODD.items()}
            call = Call(weight := 0.0 if step == 1 or step == rank else 1.0 + rank)
            out, whole = hook.update(grads, whole, weight=weight)
            for i, paths in enumerate(buckets):
                one, states[i] = hook.run({path: grads[path] for path in paths}, states[i], None, call)
                assert same_bits(one, {path: out[path] for path in paths})
                assert same_bits(states[i], restrict(whole, params, paths))

    ranks = [0, 2] if name == "bfloat16" else [0, 2, 3]  # of three, each encodes the sums of other elements
    tx.simulate(one_rank, {"data": len(ranks)}, ranks)
