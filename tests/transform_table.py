"""One row or more for each public transform of gradients, parameters or buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx


def _negate(g: Tensor) -> Tensor:
    return -g


def _to_norm_one(g: Tensor) -> Tensor:
    return g / g.norm().clamp(min=1e-6)


def _from_optax(make: Callable[[Any], Any]) -> tx.Transform:
    """Of optax's own; optax is imported only where it is needed, since that takes seconds."""
    import optax

    import fjoin.jax

    return fjoin.jax.from_optax(make(optax))


TRANSFORMS: dict[str, list[Callable[[], tx.Transform]]] = {
    "accumulate": [
        lambda: tx.accumulate(2, tx.mean("data")), lambda: tx.accumulate(1, tx.mean("data")),
        lambda: tx.accumulate(2, tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))),
    ],
    "average_parameters": [
        lambda: tx.average_parameters("data"), lambda: tx.average_parameters("data", over="live"),
        lambda: tx.average_parameters(("node", "local")), lambda: tx.every(2, tx.average_parameters("data"), first=1),
    ],
    "ema": [lambda: tx.ema(0.9), lambda: tx.chain(tx.average_parameters("data"), tx.ema(0.5))],
    "outer_step": [
        lambda: tx.outer_step(tx.mean("data"), tx.sgd(0.7, momentum=0.9, nesterov=True)),
        lambda: tx.outer_step(tx.mean("data"), tx.sgd(0.7), delay=1, mix=0.5, every=2),
        lambda: tx.outer_step(
            tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))), tx.adam(0.1), 2, first=0
        ),
    ],
    "average_buffers": [lambda: tx.average_buffers("data")],
    "broadcast_buffers": [lambda: tx.broadcast_buffers("data")],
    "compress": [
        lambda: tx.compress(tx.int8(), tx.mean("data", over="world")),
        lambda: tx.compress(tx.bfloat16(), tx.partition({"layer.*": tx.mean("data"), "*": tx.sum_over("data")})),
        lambda: tx.compress(tx.qsgd(127), tx.chain(tx.mean("data"), tx.clip_by_value(0.5))),
        lambda: tx.compress(tx.bfloat16(stochastic=True), tx.mean("data"), seed=2),
        lambda: tx.compress(torch.bfloat16, tx.mean("data")),
        lambda: tx.compress(torch.float16, tx.chain(tx.clip_by_value(0.5), tx.mean("data", over="live"))),
        lambda: tx.compress(torch.float32, tx.sum_over("data")), lambda: tx.compress(tx.int8(block=4), tx.mean("data")),
    ],
    "hierarchical_mean": [
        lambda: tx.hierarchical_mean("local", "node"), lambda: tx.hierarchical_mean("local", "node", over="world"),
        lambda: tx.compress(tx.int8(block=4), tx.hierarchical_mean("node", "local", over="live")),
        lambda: tx.compress(tx.bfloat16(), tx.hierarchical_mean("local", "node")),
        lambda: tx.error_feedback(tx.compress(tx.int8(stochastic=True), tx.hierarchical_mean("node", "local"))),
    ],
    "error_feedback": [
        lambda: tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))),
        lambda: tx.error_feedback(tx.compress(torch.bfloat16, tx.mean("data", over="world"))),
        lambda: tx.error_feedback(
            tx.partition({"layer.*": tx.compress(tx.int4(), tx.mean("data")), "*": tx.mean("data")})
        ),
    ],
    "power_sgd": [
        lambda: tx.power_sgd("data", min_compression_rate=1.0),
        lambda: tx.power_sgd("data", 2, min_compression_rate=0.5, warm_start=False, over="live", seed=3),
        lambda: tx.power_sgd("data", 2, warmup_steps=1, min_compression_rate=0.5, epsilon=1e-8, over="world"),
        lambda: tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0)),
        lambda: tx.error_feedback(tx.compress(tx.bfloat16(), tx.power_sgd("data", min_compression_rate=1.0))),
    ],
    "batched_power_sgd": [
        lambda: tx.batched_power_sgd("data", min_compression_rate=1.0),
        lambda: tx.batched_power_sgd("data", min_compression_rate=1.0, warm_start=False, over="live"),
        lambda: tx.error_feedback(tx.batched_power_sgd("data", min_compression_rate=1.0, warmup_steps=1)),
    ],
    "chain": [
        lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)),
        lambda: tx.chain(tx.clip_by_value(0.5), tx.sum_over("data")),
        lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")),
        lambda: tx.chain(tx.stateless(_to_norm_one), tx.compress(tx.int8(block=4), tx.mean("data"))),
        lambda: tx.every(2, tx.chain(tx.stateless(_to_norm_one), tx.compress(tx.int8(block=4), tx.mean("data")))),
    ],
    "clip_by_global_norm": [lambda: tx.clip_by_global_norm(0.5)], "clip_by_value": [lambda: tx.clip_by_value(0.5)],
    "record_norm": [tx.record_norm, lambda: tx.chain(tx.mean("data"), tx.record_norm())],
    "every": [lambda: tx.every(2, tx.mean("data"))],
    "from_optax": [
        lambda: _from_optax(lambda optax: optax.clip(0.5)),
        lambda: tx.chain(tx.mean("data"), _from_optax(lambda optax: optax.trace(0.9))),
    ],
    "identity": [tx.identity],
    "masked": [
        lambda: tx.masked(tx.mean("data"), "layer.*"), lambda: tx.masked(tx.clip_by_value(0.1), ["scale", "*bias"]),
        lambda: tx.masked(tx.every(2, tx.mean("data")), "layer.weight"),
    ],
    "mean": [lambda: tx.mean("data"), lambda: tx.mean("data", over="live"), lambda: tx.mean("data", over="world")],
    "partition": [
        lambda: tx.partition({"layer.*": tx.mean("data"), "*": tx.sum_over("data")}),
        lambda: tx.partition({"*bias": tx.identity(), "*": tx.clip_by_value(0.2)}),
    ],
    "skip_if_nonfinite": [lambda: tx.skip_if_nonfinite(tx.mean("data"))],
    "stateless": [lambda: tx.stateless(_negate), lambda: tx.stateless(_negate, elementwise=True)],
    "sum_over": [lambda: tx.sum_over("data")],
    "tap": [lambda: tx.tap(len), lambda: tx.chain(tx.tap(len), tx.mean("data"))],
    "switch_after": [
        lambda: tx.switch_after(1, tx.mean("data"), tx.sum_over("data")),
        lambda: tx.switch_after(2, tx.identity(), tx.mean("data")),
        lambda: tx.switch_after(2, tx.stateless(_to_norm_one), tx.compress(tx.int8(block=4), tx.mean("data"))),
    ],
}  # fmt: skip
