"""Transforms that sum scalars of their own over the ranks do so once in a step, in whatever buckets leaves travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff


class EffectiveState(NamedTuple):
    inner: Any


@tx.factory
def by_effective_ranks(hook: tx.Transform) -> tx.Transform:
    """The mean times (sum of weights)^2 / (sum of squared weights), which is the number of ranks if they are equal."""

    def update(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        own = torch.as_tensor(1.0 if weight is None else weight, dtype=torch.float64)
        total, squares = tx.psum((own, own * own), "data")
        out, new = hook.update(grads, state.inner, params, weight=weight, **extra)
        ranks = total**2 / squares.clamp(min=1e-9)
        return {path: g * ranks.to(g.dtype) for path, g in out.items()}, EffectiveState(new)

    return tx.Transform(
        lambda params: EffectiveState(hook.init(params)),
        update,
        hook.needs,
        compression=hook.compression,
        wraps="whole",
    )


def plain() -> tx.Transform:
    return tx.compress(tx.float32(), tx.mean("data"))


HOOKS: dict[str, Callable[[], tx.Transform]] = {
    "own, of a mean": lambda: by_effective_ranks(tx.mean("data")),
    "own, of an encoded mean": lambda: by_effective_ranks(plain()),
    "own twice": lambda: tx.chain(tx.clip_by_value(9.0), by_effective_ranks(tx.error_feedback(plain()))),
    "own, by path": lambda: tx.partition({"c": by_effective_ranks(tx.mean("data")), "*": tx.mean("data")}),
}
# Of each rank in each step: its weight, which is also its gradient in all numbers of `a`; 0 is a step without input.
INPUTS = [[1.0, 2.0, 0.0, 1.0], [2.0, 0.0, 0.0, 3.0], [4.0, 1.0, 0.0, 0.0]]


def start() -> dict[str, Tensor]:
    return {"a": torch.zeros(4), "b": torch.ones(3), "c": torch.ones(2, 2)}


def loss(params: Any, batch: float) -> Tensor:
    return sum((k + 1) * (params[path] * batch).sum() for k, path in enumerate("abc"))  # type: ignore[return-value]


def purely(pipeline: tx.Pipeline, batches: list[float]) -> list[dict[str, Tensor]]:
    params: Any = start()
    state, seen = pipeline.init(params), []
    for batch in batches:
        grads = {path: torch.full_like(params[path], (k + 1) * batch) for k, path in enumerate("abc")}
        params, state = pipeline.step(params, grads, state, weight=batch)
        seen.append(params)
    return seen


def by_step(pipeline: tx.Pipeline, batches: list[float], bucket_bytes: int = 1) -> list[dict[str, Tensor]]:
    step = fjoin.train_step(loss, pipeline, weight=abs, bucket_bytes=bucket_bytes)
    state, seen = step.init(start()), []
    for batch in batches:
        state, _ = step(state, batch)
        seen.append({path: p.clone() for path, p in state.params.items()})
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("bucket_bytes", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", HOOKS)
def test_buckets_match_one_call_on_the_whole_tree(name: str, bucket_bytes: int) -> None:
    """Three buckets, or two. Ranks are without input in some steps, and all of them in one."""
    pipeline = tx.fuse(HOOKS[name](), tx.sgd(0.5))
    want = tx.simulate(lambda own: purely(pipeline, own), {"data": 3}, INPUTS)
    got = tx.simulate(lambda own: by_step(pipeline, own, bucket_bytes), {"data": 3}, INPUTS)
    for seen, expected in zip(got, want, strict=True):
        assert max_diff(seen, expected) < 1e-5


def moved(values: list[float]) -> list[float]:
    """The parameters after each step on these gradients."""
    return [-0.5 * sum(values[: i + 1]) for i in range(len(values))]


@pytest.mark.parametrize("name", ["own, of a mean", "own, of an encoded mean"])
def test_results_match_the_formula_on_the_sums(name: str) -> None:
    """Of `a`; without input no step is taken."""
    found = []
    for weights in zip(*INPUTS, strict=True):
        total, squares = sum(weights), sum(w * w for w in weights)
        found.append(squares / total * total**2 / squares if total else 0.0)
    for seen in tx.simulate(lambda own: by_step(tx.fuse(HOOKS[name](), tx.sgd(0.5)), own), {"data": 3}, INPUTS):
        assert [params["a"][0].item() for params in seen] == pytest.approx(moved(found), abs=1e-5)


AFTER: dict[str, Callable[[Any], tx.Transform]] = {
    "average": lambda over: tx.every(2, tx.average_parameters("data", over=over)),
    "outer": lambda over: tx.outer_step(tx.mean("data", over=over), tx.sgd(1.0), 2),
    "outer, encoded": lambda over: tx.outer_step(tx.compress(tx.float32(), tx.mean("data", over)), tx.sgd(1.0), 2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("after", AFTER)
def test_an_average_counts_windows_in_all_buckets(after: str, over: Any) -> None:
    """The mean over the ranks of the moves of two steps, each rank's -0.5 times the sum of its gradients."""
    pipeline = tx.fuse(tx.identity(), tx.sgd(0.5), after=AFTER[after](over))
    windows = [sum(own[:2]) for own in INPUTS]
    factors = windows if over == "weight" else [1.0] * 3
    want = sum(-0.5 * w * f for w, f in zip(windows, factors, strict=True)) / sum(factors)
    for run in purely, by_step:
        for seen in tx.simulate(lambda own: run(pipeline, own), {"data": 3}, INPUTS):  # noqa: B023
            for k, path in enumerate("abc"):
                expected = torch.full_like(seen[1][path], (k + 1) * want) + start()[path]
                torch.testing.assert_close(seen[1][path], expected, rtol=1e-6, atol=1e-6)


MEANS = {"a plain mean": tx.mean("data"), "an encoded mean": tx.compress(tx.float32(), tx.mean("data"))}


@pytest.mark.parametrize("name", MEANS)
def test_stage_after_a_reduction_gets_the_weight_of_the_group(name: str) -> None:
    """That of all ranks, in pipeline.step and in a train_step."""
    seen: list[tuple[float, tuple[str, ...]]] = []

    def update(grads: Any, state: Any, params: Any, call: tx.Call) -> Any:
        seen.append((float(call.weight), call.axes))
        return grads, state

    pipeline = tx.fuse(tx.chain(MEANS[name], tx.Transform(lambda params: (), update, tx.Needs.TREE)), tx.sgd(0.1))
    params = {"w": torch.ones(3)}

    def purely(weight: float) -> None:
        pipeline.step(params, params, pipeline.init(params), weight=weight)

    def by_step(weight: float) -> None:
        step = fjoin.train_step(lambda p, batch: p["w"].sum(), pipeline, weight=lambda batch: batch)
        step(step.init(params), weight)

    for run in purely, by_step:
        seen.clear()
        tx.simulate(run, {"data": 2}, [1.0, 3.0])
        assert seen == [(4.0, ("data",))] * 2
