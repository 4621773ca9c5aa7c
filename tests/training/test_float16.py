"""float16 parameters whose batches weigh thousands, as tokens do: messages stay within the range of float16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import judged, raises_text, seen_by
from tests.training.small import step_of

MEAN, CLIP = tx.mean("data"), tx.clip_by_value(1e4)
# The first reduce first; the others apply the weights themselves, or behind other stages.
HOOKS = {"mean": MEAN, "clip": tx.chain(MEAN, tx.clip_by_global_norm(1e4)), "rest": tx.chain(MEAN, CLIP)}
BEHIND = {
    "clip, mean": tx.chain(CLIP, MEAN), "leaf, mean": tx.chain(tx.stateless(torch.clone), MEAN),
    "by path": tx.partition({"w": MEAN, "*": MEAN}), "whole tree, mean": tx.chain(tx.clip_by_global_norm(1e4), MEAN),
    "twice": tx.chain(MEAN, tx.mean("data", over="live")), "late": tx.switch_after(2, tx.chain(CLIP, MEAN), MEAN),
    "live": tx.chain(CLIP, tx.mean("data", over="live")),
}  # fmt: skip
ALL = HOOKS | BEHIND


def trained(
    hook: tx.Transform, batches: list[tuple[float, float]], on_device: bool = False, loss_dtype: Any = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """Each batch is (gradient of every element, weight)."""

    def loss(params: Any, batch: Any) -> Tensor:
        out = (params["w"] * batch[0]).sum() + (params["v"] * batch[0]).sum().half()
        return out if loss_dtype is None else out.to(loss_dtype)

    def look(state: Any, metrics: Any) -> Any:
        return metrics.stepped and (state.params["w"].tolist()[0], state.params["v"].tolist()[0], metrics.weight)

    params = {"w": torch.zeros(3, dtype=torch.float16), "v": torch.zeros(2)}
    step, state = step_of(loss, tx.fuse(hook, tx.sgd(1.0)), params, weight=lambda b: b[1], **settings)
    return [one for one in seen_by(look, judged(step, on_device), state, step.join(batches)) if one]


def of(ranks: int, hook: Any, weights: list[float], **settings: Any) -> Any:
    """Rank r has gradients of 16 (r + 1)."""
    per_rank = [[(16.0 * (r + 1), w) for w in weights] for r in range(ranks)]
    return tx.simulate(lambda b: trained(hook, b, **settings), {"data": ranks}, per_rank)


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("loss_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("hook", ALL)
def test_weights_of_thousands(hook: str, loss_dtype: Any, on_device: bool) -> None:
    """The mean of 16 and 32 is 24; the parameters are exact."""
    for weight in (1.0, 5120.0, 2.0**19):  # which float16 holds, scaled
        for seen in of(2, ALL[hook], [weight] * 3, on_device=on_device, loss_dtype=loss_dtype):
            assert seen == [(-24.0 * n, -24.0 * n, 2 * weight) for n in (1, 2, 3)]


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("hook", [*HOOKS, "live"])
def test_weights_of_thousands_in_windows(hook: str, accumulate: int) -> None:
    """If the hook applies the weights itself, only the gradients accumulated before it are scaled."""
    for seen in of(2, ALL[hook], [4096.0] * 2 * accumulate, accumulate=accumulate):
        assert [(w, total) for w, _, total in seen] == [(w, 4096.0 * 2 * accumulate) for w in (-24.0, -48.0)]


# By name: the hook, the batches of each rank, its options, and the parameters after each step.
UNEVEN: dict[str, Any] = {
    # A sum without a division at the end must fit float16 itself.
    "a sum that is divided": (tx.chain(tx.sum_over("data"), tx.stateless(lambda g: g / 8.0)), [[(16.0, 4.0)] * 2, [(32.0, 4.0)] * 2],
                              {}, [-24.0, -48.0]),
    "a sum": (tx.sum_over("data"), [[(16.0, 2.0)] * 2, [(32.0, 1.0), (8.0, 5.0)], [(4.0, 0.0), (4.0, 3.0)]], {}, [-64.0, -148.0]),
    "a sum of windows": (tx.sum_over("data"), [[(16.0, 2.0)] * 2, [(32.0, 1.0), (8.0, 5.0)], [(4.0, 0.0), (4.0, 3.0)]],
                         {"accumulate": 2}, [-148.0]),
    **{f"a step without weight, {name}": (ALL[name], [[(g, w) for w in (1.0, 0.0, 3.0)] for g in (16.0, 32.0)], {}, [-24.0, -24.0, -48.0])
       for name in (*HOOKS, "clip, mean")},
    "weights that change": (MEAN, [[(16.0, 0.0), (16.0, 3000.0), (16.0, 30_000.0), (16.0, 800.0)], [(32.0, 0.0), (64.0, 1000.0)]], {},
                            [0.0, -28.0, -44.0, -60.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_weights(name: str) -> None:
    """Ranks without input, batches without weight, and a first step without any weight."""
    hook, batches, options, want = UNEVEN[name]
    for seen in tx.simulate(lambda b: trained(hook, b, **options), {"data": len(batches)}, batches):
        assert [(w, v) for w, v, _ in seen] == [(w, w) for w in want]


@pytest.mark.parametrize("weight", [1e-9, 1e9])
def test_weight_that_a_loss_of_float16_cannot_hold_in_a_window(weight: float) -> None:
    text = ("too small" if weight < 1 else "too large", "torch.float16", "float32")
    step, state = step_of(lambda p, b: (p["w"] * b).sum().half(), accumulate=2, weight=lambda b: weight)
    raises_text(ValueError, lambda: step(state, 16.0), *text)


def test_scaling_all_weights_by_a_power_of_two_changes_nothing() -> None:
    """Results are bitwise equal if float16 holds them in full precision, so a resumed run gives the same result."""
    gradients = [0.3, 1.7, 11.1, 130.0]

    def run(times: float) -> Any:
        per_rank = [[(g * (r + 1), times * (3 + r)) for g in gradients] for r in range(3)]
        ranks = tx.simulate(lambda b: trained(MEAN, b), {"data": 3}, per_rank)
        return [[seen[:2] for seen in rank] for rank in ranks]

    want = run(1.0)
    assert all(run(times) == want for times in (2.0**4, 2.0**10, 2.0**18))
