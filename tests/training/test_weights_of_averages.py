"""Averages at the end of steps weigh by what has been trained: not by a step that is left out, nor by a later one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, max_diff, stepped

NAN = math.nan
RATE = 0.5


class Batch(NamedTuple):
    grad: float
    weight: float


def loss(params: Any, batch: Batch) -> Tensor:
    return (params["w"] * batch.grad).sum()


def start() -> dict[str, Tensor]:
    return {"w": torch.zeros(2, dtype=torch.float64)}


def purely(pipeline: tx.Pipeline, batches: list[Batch]) -> list[float]:
    params: Any = start()
    state, seen = pipeline.init(params), []
    for batch in batches:
        params, state = pipeline.step(
            params, {"w": torch.full_like(params["w"], batch.grad)}, state, weight=batch.weight
        )
        seen.append(params["w"][0].item())
    return seen


def by_step(pipeline: tx.Pipeline, batches: list[Batch], on_device: bool, axes: Any = None) -> list[float]:
    mesh = fjoin.mesh(axes or {"data": -1})
    step = judged(fjoin.train_step(loss, pipeline, mesh=mesh, weight=lambda batch: batch.weight), on_device)
    state, seen = step.init(start()), []
    for batch in batches:
        state, _ = step(state, batch)
        seen.append(state.params["w"][0].item())
    step.flush(state)
    return seen


def check(pipeline: tx.Pipeline, ranks: list[list[Batch]], want: list[list[float]], axes: Any = None) -> None:
    """By the pure pipeline, and by a step whose verdict the host or the device knows."""
    axes = axes or {"data": len(ranks)}
    runs: list[Callable[[list[Batch]], list[float]]] = [
        lambda own: purely(pipeline, own),
        lambda own: by_step(pipeline, own, False, axes),
        lambda own: by_step(pipeline, own, True, axes),
    ]
    for run in runs:
        for seen, expected in zip(tx.simulate(run, axes, ranks), want, strict=True):
            assert seen == pytest.approx(expected, abs=1e-12)


# Rank 0 has a NaN in the second step, rank 1 in the third, rank 2 in the first two, which is all of its window.
LEFT_OUT = [
    [Batch(1.0, 2.0), Batch(NAN, 7.0), Batch(3.0, 1.0), Batch(1.0, 1.0)],
    [Batch(2.0, 3.0), Batch(4.0, 1.0), Batch(NAN, 9.0), Batch(2.0, 5.0)],
    [Batch(NAN, 8.0), Batch(NAN, 9.0), Batch(5.0, 2.0), Batch(1.0, 4.0)],
]


def averaged(over: str) -> list[list[float]]:
    """The parameters of each rank after each step, averaged after the second and the fourth."""
    params, windows, seen = [0.0] * 3, [0.0] * 3, [[], [], []]  # type: ignore[var-annotated]
    for i in range(4):
        for r, batches in enumerate(LEFT_OUT):
            if not math.isnan(batches[i].grad):
                params[r] -= RATE * batches[i].grad
                windows[r] += batches[i].weight
        if i % 2:
            shares = {"weight": windows, "live": [float(w > 0) for w in windows], "world": [1.0] * 3}[over]
            params = [sum(s * p for s, p in zip(shares, params, strict=True)) / sum(shares)] * 3
            windows = [0.0] * 3
        for mine, value in zip(seen, params, strict=True):
            mine.append(value)
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("over", ["weight", "live", "world"])
@pytest.mark.parametrize("kind", ["average", "outer", "local_sgd", "mean"])
def test_skipped_step_has_weight_zero_in_the_average(kind: str, over: Any) -> None:
    sgd = tx.sgd(RATE)
    after = tx.every(2, tx.average_parameters("data", over=over))
    pipelines = {
        "average": lambda: tx.fuse(tx.identity(), sgd, after=after),
        "outer": lambda: tx.fuse(tx.identity(), sgd, after=tx.outer_step(tx.mean("data", over=over), tx.sgd(1.0), 2)),
        "local_sgd": lambda: tx.local_sgd(sgd, tx.mean("data", over=over), 2),
        "mean": lambda: tx.fuse(tx.identity(), sgd, after=tx.every(2, tx.mean("data", over))),
    }
    if kind == "mean" and over == "world":  # which divides by all ranks whatever takes part: not an average
        return
    check(tx.skip_if_nonfinite(pipelines[kind]()), LEFT_OUT, averaged(over))


def test_ranks_of_a_node_skip_steps_together() -> None:
    """Both ranks of the first node leave the second step out; the average between nodes weighs by nodes' windows."""
    ranks = [
        [Batch(1.0, 1.0), Batch(NAN, 4.0)], [Batch(3.0, 3.0), Batch(8.0, 2.0)],
        [Batch(2.0, 2.0), Batch(4.0, 1.0)], [Batch(6.0, 2.0), Batch(2.0, 3.0)],
    ]  # fmt: skip
    first = -RATE * (1 * 1 + 3 * 3) / 4
    second = -RATE * (2 * 2 + 2 * 6) / 4
    later = second - RATE * (1 * 4 + 3 * 2) / 4
    both = (4 * first + (4 + 4) * later) / 12
    pipeline = tx.fuse(tx.mean("local"), tx.sgd(RATE), after=tx.every(2, tx.mean("node")))
    want = [[first, both]] * 2 + [[second, both]] * 2
    check(tx.skip_if_nonfinite(pipeline), ranks, want, {"node": 2, "local": 2})


DEFERRED = {
    "all steps": ([[1.0, 2.0, 5.0, 1.0], [3.0, 1.0, 1.0, 2.0]], [[1.0, 3.0, 50.0, 2.0], [2.0, 1.0, 0.0, 1.0]]),
    "one left out": ([[1.0, NAN, 5.0, 1.0], [3.0, 1.0, 1.0, 2.0]], [[1.0, 3.0, 50.0, 2.0], [2.0, 1.0, 0.0, 1.0]]),
    "a later one": ([[1.0, 2.0, NAN, 1.0], [3.0, 1.0, 1.0, 2.0]], [[1.0, 3.0, 50.0, 2.0], [2.0, 1.0, 4.0, 1.0]]),
    "no input on one": ([[1.0, 2.0, 5.0, 1.0], [0.0, 0.0, 1.0, 2.0]], [[1.0, 3.0, 50.0, 2.0], [0.0, 0.0, 7.0, 1.0]]),
}  # fmt: skip


@pytest.mark.parametrize("case", DEFERRED)
def test_deferred_message_uses_the_weights_at_its_start(case: str) -> None:
    """Begun after the second step and used after the third, whose weights count for the next one."""
    grads, weights = DEFERRED[case]
    moved = [[-RATE * g if w and not math.isnan(g) else 0.0 for g, w in zip(*one, strict=True)]
             for one in zip(grads, weights, strict=True)]  # fmt: skip
    counted = [sum(w for g, w in zip(*one, strict=True) if not math.isnan(g)) for one in (
        (own[:2], of[:2]) for own, of in zip(grads, weights, strict=True))]  # fmt: skip
    mean = sum(w * sum(own[:2]) for w, own in zip(counted, moved, strict=True)) / sum(counted)
    want = [[own[0], sum(own[:2]), mean] for own in moved]
    ranks = [[Batch(g, w) for g, w in zip(*one, strict=True)][:3] for one in zip(grads, weights, strict=True)]
    pipeline = tx.fuse(tx.identity(), tx.sgd(RATE), after=tx.outer_step(tx.mean("data"), tx.sgd(1.0), 2, delay=1))
    check(tx.skip_if_nonfinite(pipeline), ranks, want)


def test_the_optimizers_state_is_averaged_by_the_same_weights() -> None:
    """Momenta of ranks that have left out a step, after the second step; the momentum is that of torch's SGD."""
    pipeline = tx.skip_if_nonfinite(
        tx.fuse(tx.identity(), tx.sgd(RATE, momentum=0.5), on_state=tx.every(2, tx.average_state("data")))
    )

    def pure(batches: list[Batch]) -> Any:
        params: Any = start()
        state = pipeline.init(params)
        for batch in batches[:2]:
            grads = {"w": torch.full_like(params["w"], batch.grad)}
            params, state = pipeline.step(params, grads, state, weight=batch.weight)
        return state.inner.optimizer["w"].momentum

    def shell(batches: list[Batch]) -> Any:
        step = fjoin.train_step(loss, pipeline, weight=lambda batch: batch.weight)
        state = stepped(step, step.init(start()), batches[:2])
        return state.clone().pipeline.inner.optimizer["w"].momentum

    own, windows = [1.0, 2.0 * 0.5 + 4.0, 0.0], [2.0, 4.0, 0.0]
    want = sum(w * m for w, m in zip(windows, own, strict=True)) / 6.0
    for run in pure, shell:
        for found in tx.simulate(run, {"data": 3}, LEFT_OUT):
            assert max_diff(found, torch.full((2,), want, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hook", ["noop", "mean"])
def test_buffers_are_averaged_by_rank_weights(hook: str, on_device: bool) -> None:
    """A rank that leaves a step out has its buffers from before and weight 0; behind a mean all ranks leave it out."""

    def with_buffers(params: Any, buffers: Any, batch: Batch) -> Any:
        return loss(params, batch), None, {"n": buffers["n"] + (0.0 if math.isnan(batch.grad) else batch.grad)}

    made = {"noop": tx.identity, "mean": lambda: tx.mean("data")}[hook]()
    pipeline = tx.skip_if_nonfinite(tx.fuse(made, tx.sgd(RATE)))
    batches = [[Batch(1.0, 2.0), Batch(NAN, 7.0)], [Batch(2.0, 6.0), Batch(4.0, 1.0)]]

    def one_rank(own: list[Batch]) -> list[float]:
        step = judged(
            fjoin.train_step(
                with_buffers, pipeline, weight=lambda batch: batch.weight, on_buffers=tx.average_buffers("data")
            ),
            on_device,
        )
        state, seen = step.init(start(), {"n": torch.zeros(2, dtype=torch.float64)}), []
        for batch in own:
            state, _ = step(state, batch)
            seen.append(state.buffers["n"][0].item())  # type: ignore[index]
        return seen

    first = (2 * 1.0 + 6 * 2.0) / 8
    assert tx.simulate(one_rank, {"data": 2}, batches) == [[first, first + 4.0 if hook == "noop" else first]] * 2
