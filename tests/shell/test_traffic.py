"""What really crosses the network: counted by torch's profiler, compared with what `explain` announced."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx

MODELS = {
    "small": lambda: {"a": torch.ones(10), "b": torch.ones(3, 4)},
    "with a large one": lambda: {"a": torch.ones(10), "big": torch.ones(1_000_001), "c": torch.ones(7)},
    "only large ones": lambda: {"big": torch.ones(1_000_001), "big2": torch.ones(1_100_000)},
    "several buckets": lambda: {f"p{i}": torch.ones(1000) for i in range(12)},
    "bfloat16": lambda: {"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(5, dtype=torch.bfloat16)},
    "mixed": lambda: {"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(5), "c": torch.ones(4, dtype=torch.float64)},
    "float64": lambda: {"a": torch.ones(10, dtype=torch.float64)},
    "with an empty leaf": lambda: {"a": torch.ones(10), "none": torch.ones(0, 3)},
}
HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"),
    "mean, clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
    "live": lambda: tx.mean("data", over="live"),
    "sum": lambda: tx.sum_over("data"),
    "clip, mean": lambda: tx.chain(tx.clip_by_value(1.0), tx.mean("data")),
    "noop": lambda: tx.noop(),
    "by path": lambda: tx.partition({"a": tx.mean("data"), "*": tx.sum_over("data")}),
}
BUCKET_BYTES = 20_000


def _pipeline(hook: str) -> tx.Pipeline:
    return tx.fuse(HOOKS[hook](), tx.adamw(0.1))


def counted(model: str, hook: str, steps: int) -> list[tuple[str, int]]:
    """(collective, payload bytes) of everything that a loop over `join` sends, in order."""
    import torch.distributed as dist

    rank = dist.get_rank()

    def loss_fn(params: Any, batch: Any) -> Any:
        return sum((p * batch).double().sum() for p in params.values())

    step = fjoin.train_step(loss_fn, _pipeline(hook), mesh=fjoin.mesh({"data": -1}), bucket_bytes=BUCKET_BYTES)
    state = step.init(MODELS[model]())
    batches = [1.0] * (steps if rank == 0 else 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for batch in step.join(batches):
            state, _ = step(state, batch)
    step.close()
    sizes = {"double": 8, "float": 4, "c10::BFloat16": 2}
    sent = []
    for event in profile.events():
        if event.name.startswith("c10d::"):
            shapes, types = event.input_shapes, event.kineto_results if False else None
            del types
            sent.append((event.name, shapes))
    del sizes
    return [(name, math.prod(shapes[0][0]) if shapes and shapes[0] and isinstance(shapes[0][0], list) else -1) for name, shapes in sent]


@pytest.mark.parametrize("model", ["small"])
def test_peek(pool: Any, model: str) -> None:
    print(pool.run(2, counted, model, "mean", 3))
    print(time.time())
