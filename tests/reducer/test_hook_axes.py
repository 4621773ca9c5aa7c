"""Hooks of the shell over several axes, and their record."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.pipelines import make_plan
from tests.helpers import raises_text


def of_hook(hook: tx.Transform) -> float:
    """A parameter after a step of two leaves in buckets of their own, on an axis that is bound around the step too."""
    step = fjoin.train_step(
        lambda p, b: sum((v * b).sum() for v in p.values()), tx.fuse(hook, tx.sgd(1.0)), mesh=fjoin.mesh({"data": -1}), bucket_bytes=1
    )  # fmt: skip
    state = step.init({"a": torch.zeros(2), "b": torch.zeros(2)})
    with fjoin.bind(fjoin.mesh({"outer": -1})), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        state, _ = step(state, torch.ones(2))
    return float(state.params["a"][0])


def use_an_outer_axis_and_a_compiled_hook() -> list[float]:
    compiled = torch.compile(lambda g: tx.psum(g, "data") / 2, fullgraph=True, backend="eager")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: compiled(g) for path, g in grads.items()}, state

    outer = tx.chain(tx.stateless(lambda g: tx.psum(g, "outer")), tx.mean("data"))
    return [of_hook(outer), of_hook(tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES))]


def test_hooks_in_waves_see_outer_axes_and_may_be_compiled(pool: Any) -> None:
    assert pool.run(2, use_an_outer_axis_and_a_compiled_hook) == [[-2.0, -1.0]] * 2


def _over_nodes() -> tx.Transform:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return tx.pmean(grads, "node"), state

    return tx.Transform(lambda params: (), update, needs=tx.Needs.NOTHING)


NODES = {"node": 2, "local": 2}


def looped(hook: tx.Transform, batches: list[float], **join: Any) -> tuple[int, int, float]:
    """The ranks that loop together, the calls of this one, and its parameter."""
    step = fjoin.train_step(lambda p, b: p["w"] * b, tx.fuse(hook, tx.sgd(1.0)), mesh=fjoin.mesh(NODES))
    state, calls = step.init({"w": torch.tensor(0.0)}), 0
    for batch in step.join(batches, **join):
        state, _ = step(state, batch)
        calls += 1
    return step.ranks, calls, float(state.params["w"])


@pytest.mark.parametrize("first", ["mean", "clip"])
@pytest.mark.parametrize(
    "over_nodes", [_over_nodes(), tx.stateless(lambda grad: tx.pmean(grad, "node"))], ids=["own", "stateless"]
)
def test_the_record_covers_all_axes_that_a_hook_may_use(first: str, over_nodes: tx.Transform) -> None:
    """A function may communicate over any axis: nodes of uneven inputs end together."""
    parts = [tx.mean("local"), over_nodes]
    hook = tx.chain(*parts if first == "mean" else [tx.clip_by_value(1e9), *parts])
    out = tx.simulate(lambda b: looped(hook, b), NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    assert out == [(4, 2, -4.0)] * 4  # (2 + 2) / 2, then (0 + 4) / 2


def test_the_record_uses_only_the_axes_of_the_hook() -> None:
    hook = tx.chain(tx.clip_by_value(1e9), tx.mean("local"))
    out = tx.simulate(lambda n: looped(hook, [1.0] * n, throw_on_early_termination=True), NODES, [2, 2, 3, 3])
    assert [one[:2] for one in out] == [(2, 2)] * 2 + [(2, 3)] * 2


def test_options_named_like_an_axis_are_not_axes() -> None:
    """`over` and a pattern are never axes; in factories of other packages any string may be one."""
    axes = {"world": 2, "data": 2}
    assert make_plan(tx.mean("data", over="world"), axes).reduce is not None
    for hook in (tx.masked(tx.mean("data"), "world"), tx.mean("data")):
        assert make_plan(tx.chain(tx.clip_by_value(1.0), hook), axes).loop_axes == ("data",)
    assert make_plan(_pmean_over(where="world"), axes).loop_axes == ("world",)
    ours = [getattr(tx, name)("data") for name in (
        "mean", "sum_over", "scatter_mean", "power_sgd", "average_parameters", "average_state", "average_buffers", "broadcast_buffers",
    )]  # fmt: skip
    for part in [*ours, tx.hierarchical_mean("data", "data2")]:
        assert set(make_plan(tx.identity(), {"data": 2, "data2": 2, "world": 2}, part).loop_axes) <= {"data", "data2"}


@tx.factory
def _pmean_over(where: str) -> tx.Transform:
    return tx.Transform(lambda params: (), lambda grads, state, params=None, **extra: (tx.pmean(grads, where), state))


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_the_weights_are_as_wide_as_the_widest_parameter(bucket_bytes: int) -> None:
    """The sum 0.1 + 0.3 + 0.7 in float64 differs from that in float32; the dtype of the first bucket must not matter."""

    def one_rank(weight: float) -> Any:
        out = []
        for hook in (tx.chain(tx.clip_by_value(1e9), tx.mean("data")), tx.masked(tx.mean("data"), "a")):
            step = fjoin.train_step(
                lambda p, b: (p["a"] * b).sum() + p["z"].sum(), tx.fuse(hook, tx.sgd(1.0)), weight=lambda b: weight,
                bucket_bytes=bucket_bytes,
            )  # fmt: skip
            state = step.init({"a": torch.zeros(2, dtype=torch.float64), "z": torch.zeros(2)})
            state, metrics = step(state, torch.full((2,), weight, dtype=torch.float64))
            out += [state.params["a"][0].item(), metrics.weight]
        return out

    weights = [0.1, 0.3, 0.7]
    mean = sum(w * w for w in weights) / sum(weights)
    for got in tx.simulate(one_rank, {"data": 3}, weights):
        assert max(abs(x - y) for x, y in zip(got, [-mean, sum(weights)] * 2, strict=True)) < 1e-15


def test_a_reduction_that_is_skipped_tells_its_sums() -> None:
    """They are this step's, not the last good one's: the loss is not finite, in the first step and in later ones."""
    hook = tx.skip_if_nonfinite(tx.mean("data"))
    for good in (0, 1):
        step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(1.0)))
        state = step.init({"w": torch.zeros(2)})
        for _ in range(good):
            state, metrics = step(state, torch.ones(2))
            assert metrics.weight == 1
        raises_text(
            fjoin.NonFinite,
            lambda step=step, state=state: step(state, torch.full((2,), float("nan"))),
            "loss of rank 0",
        )
