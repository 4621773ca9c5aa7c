"""Hooks other than a plain reduction: they run per bucket during backward, with the result of the pure pipeline."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, same_bits
from tests.training.small import net_batch, net_loss, net_params


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


MEAN, CLIP, INT8 = tx.mean("data"), tx.clip_by_value(0.1), tx.compress(tx.int8(block=4), tx.mean("data"))
MEMORY = _momentum("data")
LEAVES = tx.Transform(MEMORY.init, MEMORY.update, needs=tx.Needs.LEAVES)
UNIT = tx.chain(tx.stateless(_to_norm_one), INT8)
HOOKS: dict[str, tx.Transform] = {
    "leaf, mean, clip all": tx.chain(tx.stateless(torch.neg), MEAN, tx.clip_by_global_norm(0.1)),
    "by path": tx.partition({"*.bias": tx.mean("data", over="live"), "*": tx.sum_over("data")}),
    "some": tx.masked(MEAN, ["b.*", "scale"]), "some, every second": tx.masked(tx.every(2, MEAN), "a.weight"),
    "switch": tx.switch_after(2, tx.chain(CLIP, MEAN), tx.sum_over("data")), "every": tx.every(2, MEAN), "noop": tx.identity(),
    "bfloat16": tx.compress(torch.bfloat16, tx.chain(CLIP, MEAN)),
    "bfloat16 by path": tx.partition({"*.bias": MEAN, "*": tx.compress(torch.bfloat16, tx.mean("data", over="world"))}),
    "memory, flat": MEMORY, "memory, leaves": LEAVES, "memory, some": tx.masked(LEAVES, ["*.weight"]),
}  # fmt: skip
# A leaf stage before a message stage gets leaves, in one bucket, whose layout is that of the whole tree.
MIXED = {
    "mixed": UNIT, "mixed switch": tx.switch_after(2, tx.stateless(_to_norm_one), INT8), "mixed every": tx.every(2, UNIT),
    "mixed feedback": tx.error_feedback(UNIT), "mixed masked": tx.masked(UNIT, ["*.weight"]),
    "mixed by path": tx.partition({"*.bias": MEAN, "*": UNIT}),
}  # fmt: skip
STEPS = 4


def _pipeline(hook: str) -> tx.Pipeline:
    return tx.fuse({**HOOKS, **MIXED}[hook], tx.sgd(0.1, momentum=0.9))


def by_step(hook: str, bucket_bytes: int, ranks: int = 0) -> Any:
    mesh = fjoin.mesh({"data": -1}, ordered=True, timeout_s=60)
    step = fjoin.train_step(
        net_loss, _pipeline(hook), mesh=mesh, weight=lambda batch: 1.0 + mesh.rank, bucket_bytes=bucket_bytes
    )
    state = step.init(net_params())
    for i in range(STEPS):
        state, metrics = step(state, net_batch(mesh.rank, i))
    out = {path: p.clone() for path, p in state.params.items()}, state.pipeline.hook, metrics.loss
    step.close()
    return out


def by_pipeline(hook: str) -> Any:
    """The pure reference: the whole tree at once, after backward."""
    pipeline, params = _pipeline(hook), net_params()
    rank = int(tx.axis_index("data"))
    state = pipeline.init(params)
    for i in range(STEPS):
        grads = torch.func.grad(net_loss)(params, net_batch(rank, i))
        params, state = pipeline.step(params, grads, state, weight=1.0 + rank)
    return params, state.hook


def _fields(state: Any) -> Any:
    return getattr(state, "_fields", [None] * len(state))


@pytest.mark.sample(14)
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_per_bucket_on_processes_equals_the_whole_tree(pool: Any, hook: str, bucket_bytes: int, ranks: int) -> None:
    """Parameters, the hook's state by path, and the same to the bit in the simulator."""
    want = tx.simulate(lambda: by_pipeline(hook), {"data": ranks})
    real = pool.run(ranks, by_step, hook, bucket_bytes)
    simulated = tx.simulate(lambda: by_step(hook, bucket_bytes), {"data": ranks})
    for (params, state, loss), (want_params, want_state), (sim_params, sim_state, sim_loss) in zip(
        real, want, simulated, strict=True
    ):
        assert max_diff(params, want_params) < 1e-14
        assert max_diff(state, want_state) < 1e-14
        assert same_bits((params, state), (sim_params, sim_state)) and loss == sim_loss


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


@pytest.mark.parametrize("hook", MIXED)
def test_leaf_stage_before_a_message_stage_gets_leaves(hook: str) -> None:
    want = tx.simulate(lambda: by_pipeline(hook), {"data": 2})
    got = tx.simulate(lambda: by_step(hook, 10**6), {"data": 2})
    assert max_diff([one[:2] for one in got], want) < 1e-14
