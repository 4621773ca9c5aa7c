"""Properties for any sizes, values, weights and numbers of ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import same_bits

BLOCK = st.integers(1, 40)
# Codecs whose error is at most a part of the largest value in the block, and that part.
NEAR = st.one_of(
    st.just((tx.float32(), 1e-6)),
    st.just((tx.bfloat16(), 2.0**-8)),
    st.just((tx.bfloat16(stochastic=True), 2.0**-7)),
    st.just((tx.float16(), 2.0**-10)),
    st.builds(lambda b: (tx.int8(b), 1 / 253), BLOCK),
    st.builds(lambda b: (tx.int8(b, stochastic=True), 1 / 126), BLOCK),
    st.builds(lambda b: (tx.int4(b), 1 / 13), BLOCK),
    st.builds(lambda b: (tx.uint8(b), 1 / 253), st.one_of(st.none(), BLOCK)),
    st.builds(lambda b: (tx.fp8(b), 1 / 15), BLOCK),
)
LOSSY = st.one_of(
    NEAR.map(lambda pair: pair[0]),
    st.builds(tx.sign, st.one_of(st.none(), BLOCK)),
    st.builds(tx.top_k, st.floats(0.01, 1.0)),
    st.builds(tx.qsgd, st.integers(1, 127), BLOCK),
)
SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=0, max_size=4)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1000.0)), min_size=1, max_size=5)


def leaves_of(shapes: list[tuple[int, ...]], seed: int, size: float = 1.0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.randn(shape, generator=g) * size for i, shape in enumerate(shapes)}


def weighted(trees: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    total = sum(weights) or 1.0
    return {p: sum(w / total * t[p].double() for w, t in zip(weights, trees, strict=True)) for p in trees[0]}


@given(NEAR, SHAPES, WEIGHTS, st.integers(0, 99), st.sampled_from([1e-30, 1.0, 1e30]))
def test_an_encoded_mean_is_near_the_mean(
    codec: Any, shapes: Any, weights: list[float], seed: int, size: float
) -> None:
    """Results are bitwise equal on all ranks, and values of ranks of weight 0 have no effect."""
    made, room = codec
    hook = tx.compress(made, tx.mean("data"), seed=seed)
    trees = [leaves_of(shapes, seed + r, size) for r in range(len(weights))]

    def one_rank(grads: Any, weight: float) -> Any:
        given_ = grads if weight else {path: g * math.nan for path, g in grads.items()}
        return hook.update(given_, hook.init(grads), weight=weight)

    results = tx.simulate(one_rank, {"data": len(weights)}, trees, weights)
    want = weighted(trees, weights)
    largest = max([t.abs().max().item() for tree in trees for t in tree.values() if t.numel()], default=0.0)
    for out, _ in results:
        assert same_bits(out, results[0][0])
        for path, value in want.items():
            assert out[path].shape == value.shape
            if value.numel():
                assert (out[path].double() - value).abs().max() <= 2.1 * room * largest


@given(
    LOSSY,
    SHAPES,
    st.lists(WEIGHTS.filter(lambda w: len(w) > 1), min_size=1, max_size=4),
    st.integers(0, 99),
    st.sampled_from(["weight", "live", "world", None]),
)
def test_results_and_residuals_add_up_to_the_means(
    codec: tx.Codec, shapes: Any, steps: Any, seed: int, over: Any
) -> None:
    """The sum of the results, and of the residuals, is the sum of the means, or sums; all ranks have equal results."""
    ranks = len(steps[0])
    steps = [(step * ranks)[:ranks] for step in steps]
    hook = tx.error_feedback(tx.compress(codec, tx.mean("data", over) if over else tx.sum_over("data"), seed=seed))

    def one_rank(rank: int) -> Any:
        state, outs = hook.init(leaves_of(shapes, 0)), []
        for i, weights in enumerate(steps):
            grads = leaves_of(shapes, 10 * i + rank, 1.0 if weights[rank] else math.nan)
            out, state = hook.update(grads, state, weight=weights[rank])
            outs.append(out)
        return outs, state.error

    results = tx.simulate(one_rank, {"data": ranks}, list(range(ranks)))
    assert all(same_bits(outs, results[0][0]) for outs, _ in results)
    steps = steps if over in ("weight", None) else [[float(w > 0) for w in step] for step in steps]
    totals = [sum(step) if over in ("weight", "live") else ranks if over else 1.0 for step in steps]
    for path in leaves_of(shapes, 0):
        came = sum(out[path].double() for out in results[0][0])
        went = sum(
            w * leaves_of(shapes, 10 * i + r)[path].double() / totals[i]
            for i, step in enumerate(steps) for r, w in enumerate(step) if w
        )  # fmt: skip
        residual = sum(error[path].double() for _, error in results)
        gap = torch.as_tensor(came + residual - went)
        most = (
            max(w / total for step, total in zip(steps, totals, strict=True) for w in (*step, 0.0) if total or not w)
            if any(totals)
            else 1.0
        )
        assert gap.numel() == 0 or gap.abs().max() <= 1e-4 * len(steps) * max(1.0, most)
