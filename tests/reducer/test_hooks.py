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
from tests.helpers import max_diff, raises_text, stepped
from tests.training.small import net_batch, net_loss, net_params, step_of


def _momentum(axis: str) -> tx.Transform:
    """A reduction with a memory of each parameter, and two messages, the second from the first's result."""

    def init(params: Any) -> Any:
        return ({path: torch.zeros_like(p) for path, p in params.items()},)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        summed = tx.psum({path: g + 0.5 * state[0][path] for path, g in grads.items()}, axis)
        largest = tx.pmax({path: g.abs() for path, g in summed.items()}, axis)
        return {path: g / (1 + largest[path]) for path, g in summed.items()}, (dict(grads),)

    return tx.Transform(init, update, needs=tx.Needs.NOTHING)


def _to_norm_one(g: Tensor) -> Tensor:
    return g / g.norm().clamp(min=1e-6)


MEAN, INT8 = tx.mean("data"), tx.compress(tx.int8(block=4), tx.mean("data"))
MEMORY = _momentum("data")
LEAVES = tx.Transform(MEMORY.init, MEMORY.update, needs=tx.Needs.LEAVES)
UNIT = tx.chain(tx.stateless(_to_norm_one), INT8)
# Which no row of the places has. A leaf stage before a message stage gets leaves, in one bucket, whose layout is that of the whole tree.
SMALL, WHOLE = (1, 200), (10**6,)
HOOKS: dict[str, tuple[tx.Transform, tuple[int, ...]]] = {
    "leaf, mean, clip all": (tx.chain(tx.stateless(torch.neg), MEAN, tx.clip_by_global_norm(0.1)), SMALL),
    "some, every second": (tx.masked(tx.every(2, MEAN), "a.weight"), SMALL),
    "bfloat16 by path": (tx.partition({"*.bias": MEAN, "*": tx.compress(torch.bfloat16, tx.mean("data", over="world"))}), SMALL),
    "memory, flat": (MEMORY, SMALL), "memory, leaves": (LEAVES, SMALL), "memory, some": (tx.masked(LEAVES, ["*.weight"]), SMALL),
    "pieces": (tx.chain(tx.error_feedback(tx.compress(tx.int8(block=16), tx.scatter_mean("data"))), tx.clip_by_value(1.0)), WHOLE),
    "mixed": (UNIT, WHOLE), "mixed switch": (tx.switch_after(2, tx.stateless(_to_norm_one), INT8), WHOLE),
    "mixed every": (tx.every(2, UNIT), WHOLE), "mixed feedback": (tx.error_feedback(UNIT), WHOLE),
    "mixed masked": (tx.masked(UNIT, ["*.weight"]), WHOLE), "mixed by path": (tx.partition({"*.bias": MEAN, "*": UNIT}), WHOLE),
}  # fmt: skip
STEPS = 4


def _pipeline(hook: str) -> tx.Pipeline:
    return tx.fuse(HOOKS[hook][0], tx.sgd(0.1, momentum=0.9))


def by_step(hook: str, bucket_bytes: int) -> Any:
    rank = int(tx.axis_index("data"))
    step, state = step_of(
        net_loss, _pipeline(hook), net_params(), weight=lambda batch: 1.0 + rank, bucket_bytes=bucket_bytes
    )
    state = stepped(step, state, (net_batch(rank, i) for i in range(STEPS))).clone()
    return state.params, state.pipeline.hook


def by_pipeline(hook: str) -> Any:
    """The pure reference: the whole tree at once, after backward."""
    pipeline, params = _pipeline(hook), net_params()
    rank = int(tx.axis_index("data"))
    state = pipeline.init(params)
    for i in range(STEPS):
        grads = torch.func.grad(net_loss)(params, net_batch(rank, i))
        params, state = pipeline.step(params, grads, state, weight=1.0 + rank)
    return params, state.hook


@pytest.mark.parametrize("hook", HOOKS)
def test_per_bucket_is_the_whole_tree(hook: str) -> None:
    """Parameters, and the hook's state by path, for any buckets."""
    want = tx.simulate(lambda: by_pipeline(hook), {"data": 2})
    for bucket_bytes in HOOKS[hook][1]:
        got = tx.simulate(lambda: by_step(hook, bucket_bytes), {"data": 2})  # noqa: B023
        assert max_diff(got, want) < 1e-14


def _fails_in(wave: int) -> tx.Transform:
    """A hook that fails on rank 0 before its first message, or behind it."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        fails = int(tx.axis_index("data")) == 0 and "w1" in grads
        if fails and wave == 1:
            raise ValueError("this hook is broken")
        out = tx.psum(grads, "data")
        if fails and wave == 2:
            raise ValueError("this hook is broken")
        return tx.psum(out, "data"), state

    return tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES)


def fail_on_one_rank(wave: int) -> tuple[str, str, int]:
    before = set(threading.enumerate())
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    step = fjoin.train_step(
        lambda p, b: sum((v * b).sum() for v in p.values()), tx.fuse(_fails_in(wave), tx.sgd(0.1)), mesh=mesh, bucket_bytes=1
    )  # fmt: skip
    state = step.init({f"w{i}": torch.ones(4) for i in range(4)})
    try:
        step(state, torch.ones(4))
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "nothing", ""
    new = {t for t in threading.enumerate() if t not in before and t.name.endswith("(_run)")}  # those of buckets
    for thread in new:
        thread.join(5.0)
    return kind, text, sum(thread.is_alive() for thread in new)


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
        step, state = step_of(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, tx.sgd(1.0)), {"w": torch.zeros(2)})
        for _ in range(good):
            state, metrics = step(state, torch.ones(2))
            assert metrics.weight == 1
        raises_text(
            fjoin.NonFinite,
            lambda step=step, state=state: step(state, torch.full((2,), float("nan"))),
            "loss of rank 0",
        )
