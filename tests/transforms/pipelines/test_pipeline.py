"""Words, windows and steps of pure pipelines, by hand; ranks with other pipelines get an error in the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fjoin import DesyncError, transforms as tx
from fjoin.transforms.base.record_words import numbers_of, rank_bit, ranks_in, words_of
from tests.helpers import max_diff, raises_text, same_bits

# -- means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100, 512])
def test_words_in_float32_count_exactly(ranks: int) -> None:
    """Sums up to 2^48 / ranks to the unit, negative and fractional values to float32's precision or better."""
    g = torch.Generator().manual_seed(ranks)
    top = 2**48 // ranks // ranks
    counts = torch.randint(0, max(top, 2), (ranks,), generator=g).tolist()
    of_ranks = [{"count": float(c), "minus": -0.125 * c, "loss": 1e-3 * (c % 7), "big": 1e30} for c in counts]
    total = sum(_words(one, torch.float32, ranks) for one in of_ranks)
    out = dict(zip(of_ranks[0], numbers_of(total, ranks, False), strict=True))
    assert out["count"] == sum(counts)
    assert out["minus"] == pytest.approx(-0.125 * sum(counts), rel=1e-7)
    assert out["loss"] == pytest.approx(sum(one["loss"] for one in of_ranks), rel=1e-6)
    assert out["big"] == pytest.approx(1e30 * ranks, rel=1e-7 * ranks)
    for one in of_ranks:
        on_host = words_of(one, list(one.values()), torch.float32, ranks, torch.device("cpu"))
        assert on_host.equal(_words(one, torch.float32, ranks))
    assert numbers_of(total, ranks, True) == [v.item() for v in out.values()]


def _words(values: dict[str, float], dtype: torch.dtype, ranks: int) -> Any:
    tensors = torch.tensor(list(values.values()), dtype=torch.float64).unbind(0)
    return words_of(values, tensors, dtype, ranks, torch.device("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_words_preserve_nonfinite_values(value: float) -> None:
    for dtype in (torch.float32, torch.float64):
        total = _words({"a": value, "b": 1.0}, dtype, 3) + _words({"a": 1.0, "b": 1.0}, dtype, 3)
        out = dict(zip("ab", numbers_of(total, 3, False), strict=True))
        assert not torch.isfinite(out["a"]) and out["b"] == 2


def test_masks_name_ranks() -> None:
    assert ranks_in([5.0, 2.0]) == (0, 2, 25) and rank_bit(25) == (1, 2.0)


# -- when --------------------------------------------------------------------------------------------


def test_later_stages_do_not_run_within_a_window() -> None:
    pipeline = tx.fuse(tx.chain(tx.accumulate(2, tx.identity()), tx.clip_by_value(1.0)), tx.adam(0.1))
    p = {"w": torch.ones(2)}
    state = pipeline.init(p)
    new, state = pipeline.step(p, {"w": torch.ones(2)}, state)
    assert same_bits(new, p) and state.optimizer["w"].step == 0
    new, state = pipeline.step(p, {"w": torch.ones(2)}, state)
    assert not same_bits(new, p) and state.optimizer["w"].step == 1
    inside = tx.masked(tx.accumulate(2, tx.identity()), "w")
    raises_text(ValueError, lambda: inside.update({"w": torch.ones(2)}, inside.init(p)), "put accumulate around it")


def test_fusing_by_hand() -> None:
    """fuse is its parts one after the other."""
    hook, opt = tx.chain(tx.clip_by_value(0.5), tx.clip_by_global_norm(0.3)), tx.adamw(0.1)
    after = tx.stateless(lambda p: p * 0.5)
    pipeline = tx.fuse(hook, opt, after)
    p, g = {"w": torch.ones(3, dtype=torch.float64)}, {"w": torch.arange(3.0, dtype=torch.float64)}
    got, state = pipeline.step(p, g, pipeline.init(p))
    g2, hook_state = hook.update(g, hook.init(p), p)
    p2, opt_state = opt.step(p, g2, opt.init(p))
    assert max_diff(got, {"w": p2["w"] * 0.5}) == 0
    assert same_bits(state, tx.PipelineState(hook_state, opt_state, (), (), 1, torch.zeros((), dtype=torch.float64)))


def test_flush_warns_of_gradients_that_have_had_no_step() -> None:
    pipeline = tx.fuse(tx.accumulate(2, tx.mean("data")), tx.sgd(1.0))

    def one_rank(calls: int) -> float:
        params = {"a": torch.zeros(1)}
        state = pipeline.init(params)
        for _ in range(calls):
            params, state = pipeline.step(params, {"a": torch.ones(1)}, state)
        return float(pipeline.flush(params, state)[0]["a"])

    assert tx.simulate(one_rank, {"data": 1}, [2]) == [-1.0]
    with pytest.warns(UserWarning, match="unfinished window of accumulate"):
        assert tx.simulate(one_rank, {"data": 1}, [3]) == [-1.0]


MEAN = tx.mean("data")
# By name: rank -> its pipeline.
PIPELINES: dict[str, Callable[[int], tx.Pipeline]] = {
    "a learning rate": lambda r: tx.fuse(MEAN, tx.sgd(0.1 * (r + 1))),
    "an optimizer": lambda r: tx.fuse(MEAN, (tx.sgd, tx.adam)[r](0.1)),
    "an optimizer with schedules": lambda r: tx.fuse(MEAN, (tx.sgd, tx.adam)[r](tx.cosine(0.1, 10))),
    "a clip": lambda r: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(0.1 * (r + 1))), tx.sgd(0.1)),
    "a codec": lambda r: tx.fuse(tx.compress((tx.int4, tx.int8)[r](), tx.mean("data")), tx.sgd(0.1)),
    "a mask": lambda r: tx.fuse(tx.masked(MEAN, "ab"[r]), tx.sgd(0.1)),
    "what follows": lambda r: tx.fuse(MEAN, tx.sgd(0.1), after=tx.every(2 + r, tx.average_parameters("data"))),
    "masters": lambda r: tx.fuse(MEAN, (tx.sgd(0.1), tx.mixed_precision(tx.sgd(0.1)))[r]),
    "what is skipped": lambda r: tx.skip_if_nonfinite(tx.fuse(MEAN, tx.sgd(0.1 * (r + 1)))),
    "what is sharded": lambda r: tx.zero(MEAN, tx.adam(0.1 * (r + 1)), "data"),
}


def steps(rank: int, make: Callable[[int], tx.Pipeline], ranks: tuple[int, int]) -> Any:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    pipeline = make(ranks[rank])
    state = pipeline.init(params)
    for _ in range(2):
        params, state = pipeline.step(params, {"a": torch.ones(2), "b": torch.full((2,), 3.0)}, state)
    return params


@pytest.mark.parametrize("name", PIPELINES)
def test_another_pipeline_is_named(name: str) -> None:
    make = PIPELINES[name]
    raises_text(DesyncError, lambda: tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(0, 1)] * 2), "rank 1", "pipeline")  # fmt: skip
    for equal in (0, 1):
        tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(equal, equal)] * 2)


def test_a_schedule_of_an_outer_optimizer_that_differs_by_rank() -> None:
    def make(r: int) -> tx.Pipeline:
        def rate(step: Any) -> float:
            return 0.1 if step < 1 else 0.1 * (r + 1)

        return tx.diloco(tx.sgd(0.1), tx.mean("data"), every=1, outer=tx.sgd(rate))

    raises_text(DesyncError, lambda: tx.simulate(steps, {"data": 2}, [0, 1], [make] * 2, [(0, 1)] * 2), "rank 1", "lr=0.2")  # fmt: skip
