"""Hooks other than a plain reduction: they run per bucket during backward, with the result of the pure pipeline."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.pipelines import make_plan
from tests.helpers import by_hand, max_diff, raises_text, seen_by
from tests.places import run
from tests.ranks import end_of
from tests.rows import ROWS, TWO, Row
from tests.training.small import step_of


def _momentum(axis: str, needs: tx.Needs = tx.Needs.NOTHING) -> tx.Transform:
    """A reduction with a memory of each parameter, and two messages, the second from the first's result."""

    def update(grads: Any, state: Any) -> Any:
        summed = tx.psum({path: g + 0.5 * state[0][path] for path, g in grads.items()}, axis)
        largest = tx.pmax({path: g.abs() for path, g in summed.items()}, axis)
        return {path: g / (1 + largest[path]) for path, g in summed.items()}, (dict(grads),)

    return by_hand(update, needs, lambda params: ({path: torch.zeros_like(p) for path, p in params.items()},))


def _to_norm_one(g: Tensor) -> Tensor:
    return g / g.norm().clamp(min=1e-6)


MEAN, INT8 = tx.mean("data"), tx.compress(tx.int8(block=4), tx.mean("data"))
MEMORY, LEAVES = _momentum("data"), _momentum("data", tx.Needs.LEAVES)
UNIT = tx.chain(tx.stateless(_to_norm_one), INT8)
# Which no row of the places has. A leaf stage before a message stage gets leaves, in one bucket, whose layout is that of the whole tree.
SMALL, WHOLE = (1, 200), (10**6,)
HOOKS: dict[str, tuple[tx.Transform, tuple[int, ...]]] = {
    "leaf, mean, clip all": (tx.chain(tx.stateless(torch.neg), MEAN, tx.clip_by_global_norm(0.1)), SMALL),
    "some, every second": (tx.masked(tx.every(2, MEAN), "layer.weight"), SMALL),
    "bfloat16 by path": (tx.partition({"bias": MEAN, "*": tx.compress(torch.bfloat16, tx.mean("data", over="world"))}), SMALL),
    "memory, flat": (MEMORY, SMALL), "memory, leaves": (LEAVES, SMALL), "memory, some": (tx.masked(LEAVES, ["*.weight"]), SMALL),
    "pieces": (tx.chain(tx.error_feedback(tx.compress(tx.int8(block=16), tx.scatter_mean("data"))), tx.clip_by_value(1.0)), WHOLE),
    "mixed": (UNIT, WHOLE), "mixed switch": (tx.switch_after(2, tx.stateless(_to_norm_one), INT8), WHOLE),
    "mixed every": (tx.every(2, UNIT), WHOLE), "mixed feedback": (tx.error_feedback(UNIT), WHOLE),
    "mixed masked": (tx.masked(UNIT, ["*.weight"]), WHOLE), "mixed by path": (tx.partition({"bias": MEAN, "*": UNIT}), WHOLE),
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_per_bucket_is_the_whole_tree(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, and the hook's state by path, for any buckets."""
    made, sizes = HOOKS[hook]
    monkeypatch.setitem(ROWS, hook, Row(lambda: tx.fuse(made, tx.sgd(0.1, momentum=0.9)), TWO))
    want = [(seen.params, seen.state) for seen in run(hook, "pure", "uneven")]
    for bucket_bytes in sizes:
        got = [(seen.params, seen.state) for seen in run(hook, "simulated", "uneven", bucket_bytes=bucket_bytes)]
        assert max_diff(got, want) < 1e-14


def _fails_in(wave: int) -> tx.Transform:
    """A hook that fails on rank 0 before its first message, or behind it."""

    def update(grads: Any, state: Any) -> Any:
        fails = int(tx.axis_index("data")) == 0 and "w1" in grads
        if fails and wave == 1:
            raise ValueError("this hook is broken")
        out = tx.psum(grads, "data")
        if fails and wave == 2:
            raise ValueError("this hook is broken")
        return tx.psum(out, "data"), state

    return by_hand(update, tx.Needs.LEAVES)


def of_all(params: Any, batch: Tensor) -> Any:
    return sum((p * batch).sum() for p in params.values())


def fail_on_one_rank(wave: int) -> tuple[str, str, int]:
    before = set(threading.enumerate())
    mesh, params = fjoin.mesh({"data": -1}, timeout_s=60), {f"w{i}": torch.ones(4) for i in range(4)}
    step, state = step_of(of_all, tx.fuse(_fails_in(wave), tx.sgd(0.1)), params, mesh=mesh, bucket_bytes=1)
    end = end_of(lambda: step(state, torch.ones(4)))
    new = {t for t in threading.enumerate() if t not in before and t.name.endswith("(_run)")}  # those of buckets
    for thread in new:
        thread.join(5.0)
    return end.kind, end.text, sum(thread.is_alive() for thread in new)


@pytest.mark.parametrize("wave", [1, 2])
def test_a_hook_that_fails_on_one_rank_ends_all(pool: Any, wave: int) -> None:
    """The error comes out on that rank, PeerLost on the other, and no thread of a bucket is left behind."""
    (kind, text, left), (other, reported, left_there) = pool.run(2, fail_on_one_rank, wave)
    assert (kind, text) == ("ValueError", "this hook is broken")
    assert other == "PeerLost" and "this hook is broken" in reported and "rank 0" in reported
    assert left == left_there == 0


# -- hooks of the shell over several axes, and their record --


def of_hook(hook: tx.Transform) -> float:
    """A parameter after a step of two leaves in buckets of their own, on an axis that is bound around the step too."""
    params, mesh = {"a": torch.zeros(2), "b": torch.zeros(2)}, fjoin.mesh({"data": -1})
    step, state = step_of(of_all, tx.fuse(hook, tx.sgd(1.0)), params, mesh=mesh, bucket_bytes=1)
    with fjoin.bind(fjoin.mesh({"outer": -1})), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        state, _ = step(state, torch.ones(2))
    return float(state.params["a"][0])


def use_an_outer_axis_and_a_compiled_hook() -> list[float]:
    compiled = torch.compile(lambda g: tx.psum(g, "data") / 2, fullgraph=True, backend="eager")
    inner = by_hand(lambda grads, state: ({path: compiled(g) for path, g in grads.items()}, state), tx.Needs.LEAVES)
    outer = tx.chain(tx.stateless(lambda g: tx.psum(g, "outer")), tx.mean("data"))
    return [of_hook(outer), of_hook(inner)]


def test_hooks_in_waves_see_outer_axes_and_may_be_compiled(pool: Any) -> None:
    assert pool.run(2, use_an_outer_axis_and_a_compiled_hook) == [[-2.0, -1.0]] * 2


NODES, LOCAL, SGD = {"node": 2, "local": 2}, tx.mean("local"), tx.sgd(1.0)
UNEVEN, LONGER = [[1.0], [3.0], [2.0, 4.0], [2.0]], [[1.0] * n for n in (3, 3, 5, 4)]
OVER_NODES = {
    "own": by_hand(lambda grads, state: (tx.pmean(grads, "node"), state)),
    "stateless": tx.stateless(lambda grad: tx.pmean(grad, "node")),
}
# A pipeline, the batches of each rank, and of each the ranks that loop together, its calls, and its parameter at the end.
LOOPED: dict[str, tuple[tx.Pipeline, list[list[float]], list[Any]]] = {
    # A function may communicate over any axis: nodes of uneven inputs end together. (2 + 2) / 2, then (0 + 4) / 2.
    **{f"mean, {name}": (tx.fuse(tx.chain(LOCAL, over), SGD), UNEVEN, [(4, 2, -4.0)] * 4) for name, over in OVER_NODES.items()},
    **{f"clip, {name}": (tx.fuse(tx.chain(tx.clip_by_value(1e9), LOCAL, over), SGD), UNEVEN, [(4, 2, -4.0)] * 4)
       for name, over in OVER_NODES.items()},
    # (-2 * 2 + -2 * 2) / 4, then the second node's -2 - 4 alone.
    "parameters": (tx.fuse(LOCAL, SGD, after=tx.mean("node")), UNEVEN, [(4, 2, -6.0)] * 4),
    # Also while the hook's own axes are those of a node.
    "parameters later": (tx.fuse(tx.switch_after(2, tx.mean(("node", "local")), LOCAL), SGD, after=tx.every(3, tx.mean("node"))), LONGER,
                         [(4, 5, -3.0)] * 2 + [(4, 5, -5.0)] * 2),
    # The axes of the hook and no others.
    "a node": (tx.fuse(tx.chain(tx.clip_by_value(1e9), LOCAL), SGD), LONGER, [(2, 3, -3.0)] * 2 + [(2, 5, -5.0)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPED)
def test_ranks_loop_together_over_all_axes_that_a_pipeline_uses(name: str) -> None:
    pipeline, batches, want = LOOPED[name]

    def one_rank(own: list[float]) -> Any:
        step, state = step_of(lambda p, b: p["w"] * b, pipeline, {"w": torch.tensor(0.0)}, mesh=fjoin.mesh(NODES))
        seen = seen_by(lambda state, _: float(state.params["w"]), step, state, step.join(own))
        return step.ranks, len(seen), seen[-1]

    assert tx.simulate(one_rank, NODES, batches) == want


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
            params = {"a": torch.zeros(2, dtype=torch.float64), "z": torch.zeros(2)}
            loss, pipeline = lambda p, b: (p["a"] * b).sum() + p["z"].sum(), tx.fuse(hook, tx.sgd(1.0))
            step, state = step_of(loss, pipeline, params, weight=lambda b: weight, bucket_bytes=bucket_bytes)
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
        step, state = step_of(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(1.0)), {"w": torch.zeros(2)})
        for _ in range(good):
            state, metrics = step(state, torch.ones(2))
            assert metrics.weight == 1
        raises_text(
            fjoin.NonFinite,
            lambda step=step, state=state: step(state, torch.full((2,), float("nan"))),
            "loss of rank 0",
        )
