"""The methods of examples/papers.py equal their formulas, for any weights, ranks without input and steps without any."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fjoin
from examples.papers import dgc, ef21, one_bit_adam
from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.oracle.papers import deep_compression, differences, largest, one_bit, signs

# Elements, which need no padding in a bucket; the step in which no rank has input; leaves.
N, IDLE, PATHS = 48, 4, ("a", "b", "c")
# Name -> the transform, and the result of each step from gradients, weights, and whether there is a code.
PAPERS: dict[str, Any] = {
    "ef21": (lambda: ef21("data", tx.top_k(0.2)), lambda g, w, coded: differences(g, w, largest(0.2 if coded else 1.0))),
    "dgc": (lambda: dgc("data", 0.1, 0.8), lambda g, w, coded: deep_compression(g, w, largest(0.1 if coded else 1.0), 0.8)),
    "one_bit_adam": (
        lambda: one_bit_adam("data", 3, (0.8, 0.95)),
        lambda g, w, coded: one_bit(g, w, signs if coded else lambda x: x, 3, 0.8, 0.95),
    ),
}  # fmt: skip
WEIGHTS: dict[str, Any] = {
    "equal": lambda step, rank: 1.0,
    "uneven": lambda step, rank: 1.0 + (3 * step + 5 * rank) % 7,
    "idle": lambda step, rank: 0.0 if step == IDLE or (step + rank) % 3 == 1 else 1.0 + rank,
}
every_paper = pytest.mark.parametrize("name", PAPERS)


def gradients(steps: int, ranks: int) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(steps + 10 * ranks)
    return [[torch.randn(N, generator=g) for _ in range(ranks)] for _ in range(steps)]


def memory(state: Any) -> list[Tensor]:  # all but the count of calls
    return [leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, Tensor)]


@every_paper
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_as_its_formula(name: str, kind: str, ranks: int) -> None:
    """The hook alone, and the parameters of `fuse`. The gradient of a rank without input is NaN; with input, all see it."""
    make, formula = PAPERS[name]
    hook, pipeline, grads = make(), tx.fuse(make(), tx.sgd(1.0)), gradients(9, ranks)
    weights = [[WEIGHTS[kind](step, rank) for rank in range(ranks)] for step in range(9)]

    def one_rank(rank: int) -> Any:
        outs, params = [], torch.zeros(N)
        state, fused = hook.init(params), pipeline.init(params)
        for step, of in zip(grads, weights, strict=True):
            grad, before = step[rank] if of[rank] else step[rank] * torch.nan, (memory(state), params)
            out, state = hook.update(grad, state, weight=of[rank])
            params, fused = pipeline.step(params, grad, fused, weight=of[rank])
            outs.append(out)
            assert any(of) or (not out.any() and same_bits((memory(state), params), before))
        for number in (0, 9):  # in a warm-up, and behind it
            out, after = hook.update(grads[0][rank] * (torch.nan if rank == 0 else 1.0), state, step=number)
            assert out.isnan().any() and same_bits(memory(after), memory(state))
        return outs, params

    found, want = tx.simulate(one_rank, {"data": ranks}, [*range(ranks)]), formula(grads, weights, ranks > 1)
    assert same_bits(found, ranks * found[:1]) and max_diff([*found[0][0], found[0][1]], [*want, -sum(want)]) < 1e-4


@every_paper
@pytest.mark.parametrize("law", fjoin.testing.LAWS["transform"], ids=lambda law: law.__name__)
def test_laws(name: str, law: Any) -> None:
    if (name, law.__name__) != ("one_bit_adam", "is_itself_alone"):  # it gives a direction, not a mean
        law(PAPERS[name][0])
