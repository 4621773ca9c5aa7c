"""Accumulation windows, on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.oracle.whole_batch import make_batches, make_model, parameters, train
from tests.reducer.one_rank import train_one_rank
from tests.training.small import X, one

SIZES = [[3, 2, 4], [5], []]


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_accumulation_is_one_step_on_the_window(window: int) -> None:
    """Ranks with 7, 4 and 0 micro-batches; the last windows are incomplete."""
    sizes = [[3, 2, 4, 1, 2, 5, 3], [5, 1, 2, 2], []]
    batches = make_batches(3, sizes)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    results = tx.simulate(lambda b: train_one_rank(b, pipeline, accumulate=window), {"data": 3}, batches)
    calls = -(-7 // window) * window
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    start = parameters(model)
    windows = [[_together([m for b in batches for m in b[i : i + window]])] for i in range(0, 7, window)]
    for whole in windows:
        train(model, optimizer, [whole])
    for r in results:
        assert r["calls"] == calls and len(r["losses"]) == len(windows)
        moved = {path: p - start[path] for path, p in r["params"].items()}
        assert max_diff(moved, {path: p - start[path] for path, p in parameters(model).items()}) < 1e-12
        assert same_bits(r["params"], results[0]["params"])


def _together(batches: list[Any]) -> Any:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_accumulation_with_a_custom_stage() -> None:
    sizes = [[3, 2, 4], [5, 1]]
    batches = make_batches(3, sizes)
    a = tx.simulate(
        lambda b: train_one_rank(b, tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2), {"data": 2}, batches
    )
    hook = tx.chain(tx.stateless(lambda g: g * 1.0), tx.mean("data"))
    b = tx.simulate(lambda b: train_one_rank(b, tx.fuse(hook, tx.sgd(0.1)), accumulate=2), {"data": 2}, batches)
    assert max_diff(a[0]["params"], b[0]["params"]) < 1e-14 and a[0]["calls"] == b[0]["calls"] == 4


WHOLE_TREE = {
    "left out": lambda: tx.skip_if_nonfinite(tx.mean("data")),
    "clipped": lambda: tx.chain(tx.clip_by_global_norm(0.05), tx.mean("data")),
    "noop": tx.identity,
}


@pytest.mark.parametrize("hook", WHOLE_TREE)
def test_a_hook_on_the_whole_tree_is_given_the_mean_of_the_window(hook: str) -> None:
    """The result equals that of one step on all batches of the window."""
    batches = make_batches(3, [[3, 2, 4, 1], [5, 1, 2, 2]])
    together = [[_together(b[:2]), _together(b[2:])] for b in batches]
    start = parameters(make_model())

    def moved(given: Any, window: int) -> Any:
        pipeline = tx.fuse(WHOLE_TREE[hook](), tx.sgd(0.1))
        results = tx.simulate(lambda b: train_one_rank(b, pipeline, accumulate=window), {"data": 2}, given)
        return [{path: p - start[path] for path, p in r["params"].items()} for r in results]

    want = moved(together, 1)
    assert max_diff(moved(batches, 2), want) < 1e-13 and want[0]["0.weight"].abs().max() > 1e-3


def test_calls_within_a_window_report_no_loss() -> None:
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)), accumulate=2)
    state, metrics = step(state, X)
    assert not metrics.stepped and metrics.loss != metrics.loss and state.step == 0
    state, metrics = step(state, X)
    assert metrics.stepped and metrics.weight == 2 and state.step == 1
