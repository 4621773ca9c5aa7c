"""What a user keeps beside a run: JSON with tensors in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

PIPELINE, START = tx.fuse(tx.mean("data"), tx.sgd(0.1)), {"w": torch.ones(2)}
EXTRA = {
    "best": 0.5,
    "history": [1, 2.5, None, "text", {"a.b": [True]}],
    "mean": torch.arange(6.0).reshape(2, 3),
    "seen": [torch.tensor(3), torch.zeros(0, 2, dtype=torch.bfloat16), torch.tensor([1 + 2j])],
}


def make_step() -> fjoin.TrainStep:
    return fjoin.train_step(lambda p, x: (p["w"] * x).sum(), PIPELINE)


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_extra_is_read_back_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    def save(rank: int) -> None:
        step = make_step()
        fjoin.save(tmp_path, step, step.init(START), extra=EXTRA)

    def load(rank: int) -> Any:
        runs = fjoin.Checkpoints(tmp_path, make_step())
        runs.restore(START)
        return runs.extra

    tx.simulate(save, {"data": 2}, [0, 1])
    for extra in tx.simulate(load, {"data": ranks}, list(range(ranks))):
        assert_equal(extra, EXTRA)


def test_extra_of_saves_may_differ(tmp_path: Path) -> None:
    step = make_step()
    state, runs = step.init(START), fjoin.Checkpoints(tmp_path, step, every=1)
    for extra in ({"a": torch.ones(1)}, None, {"b": torch.ones(3), "a": 5}, {"a": torch.ones(2)}):
        state, _ = step(state, torch.ones(2))
        runs.save(state, extra=extra)
        again = fjoin.Checkpoints(tmp_path, make_step())
        again.restore(START)
        assert_equal(again.extra, extra)


@pytest.mark.parametrize(
    "extra",
    [
        {1: 2},
        (1, 2),
        {"a": float("nan")},
        {"a": {3}},
        {"$tensor": 1},
        {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
    ],
)
def test_other_values_are_refused_before_a_byte_is_written(extra: Any, tmp_path: Path) -> None:
    step = make_step()
    raises_text(TypeError, lambda: fjoin.save(tmp_path, step, step.init(START), extra=extra), "extra must be JSON")
    assert not list(tmp_path.iterdir())
