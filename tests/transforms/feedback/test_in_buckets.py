"""Error feedback bucket by bucket: what buckets share is computed once, and what they do not share is their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.testing._compare import same_bits
from fjoin.transforms.base import BucketSums, restrict

SHAPES = {"plain": (3,), "a": (5,), "b": (2, 3)}
BUCKETS = (["plain"], ["a"], ["b"])  # nothing in the first one is encoded
WEIGHTS = [2.0, 0.0, 3.0, 1.0]


@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("without_input", ["freeze", "flush"])
def test_buckets_equal_the_whole(without_input: Any, apart: bool) -> None:
    """Also where each bucket has a table of weights of its own, as after a load, and where one has another history."""

    def one_rank() -> None:
        encoded = tx.compress(tx.bfloat16(), tx.mean("data"))
        hook = tx.error_feedback(tx.partition({"plain": tx.mean("data"), "*": encoded}), without_input)
        rank = int(tx.axis_index("data"))
        g = torch.Generator().manual_seed(rank)
        params = {path: torch.zeros(shape) for path, shape in SHAPES.items()}
        whole = hook.init(params)
        if apart:
            whole.last["b"] = torch.tensor([[4.0, 7.0]], dtype=torch.float64)
        states = [restrict(whole, params, paths) for paths in BUCKETS]
        for step, weight in enumerate(WEIGHTS):
            weight = weight if rank else WEIGHTS[-1 - step]
            grads = {path: torch.randn(shape, generator=g) for path, shape in SHAPES.items()}
            out, whole = hook.update(grads, whole, weight=weight)
            first: BucketSums | None = None
            for i, paths in enumerate(BUCKETS):
                sums = BucketSums(torch.float32, first)
                some = {path: grads[path] for path in paths}
                one, states[i] = hook.update(some, states[i], weight=weight, sums=sums)
                first = first or sums
                assert same_bits(one, {path: out[path] for path in paths})
                assert same_bits(states[i], restrict(whole, params, paths))

    tx.simulate(one_rank, {"data": 2})  # where no residual depends on the buckets
