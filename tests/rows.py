"""The pipelines that are trained in all places, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fjoin import transforms as tx

TWO, THREE, NODES = {"data": 2}, {"data": 3}, {"node": 2, "local": 2}
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
SGD, MOMENTUM, ADAM = tx.sgd(0.1), tx.sgd(0.1, momentum=0.9, weight_decay=0.1), tx.adamw(0.05)
EVERY = tx.every(2, tx.mean("data"))
ALL = tx.mean(("node", "local"))


class Row(NamedTuple):
    """A pipeline.

    Attributes:
        whole: Whether one process on the batches of all ranks comes to the same.
        tolerance: Of parameters between places; larger where a message's blocks are those of a bucket.
        options: Of train_step.
    """

    make: Callable[[], tx.Pipeline]
    axes: dict[str, int] = THREE
    whole: bool = False
    loss: str = "net"
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    options: dict[str, Any] = {}


def _of(hook: tx.Transform, optimizer: tx.Optimizer = MOMENTUM, **settings: Any) -> Row:
    ends = {key: settings.pop(key) for key in ("after", "on_state") if key in settings}
    return Row(lambda: tx.fuse(hook, optimizer, **ends), **settings)


LOSSY = 0.05
ROWS: dict[str, Row] = {
    "mean": _of(MEAN, whole=True),
    "mean, Adam": _of(MEAN, ADAM, axes=TWO, whole=True),
    "mean, a linear loss": _of(MEAN, loss="linear", whole=True),
    "mean, buffers": _of(MEAN, loss="buffered"),
    "mean over live ranks": _of(tx.mean("data", over="live")),
    "mean over the world": _of(tx.mean("data", over="world")),
    "mean over two axes": _of(tx.mean(("node", "local")), axes=NODES, whole=True),
    "mean of means": _of(tx.chain(tx.mean("local"), tx.mean("node")), axes=NODES, whole=True),
    "sum": _of(tx.sum_over("data")),
    "clipped": _of(tx.chain(MEAN, tx.clip_by_global_norm(0.1)), whole=True),
    "clipped first": _of(tx.chain(tx.clip_by_value(0.05), MEAN)),
    "by path": _of(tx.partition({"layer.*": MEAN, "*": tx.mean("data", over="live")})),
    "masked": _of(tx.masked(MEAN, "layer.*")),
    "every second step": _of(EVERY),
    "then another": _of(tx.switch_after(2, MEAN, tx.mean("data", over="live"))),
    "skip": Row(lambda: tx.skip_if_nonfinite(tx.fuse(MEAN, MOMENTUM)), whole=True),
    "frozen": _of(MEAN, tx.partition({"layer.*": tx.frozen(), "*": ADAM}), whole=True),
    "Muon": _of(MEAN, tx.partition({"layer.*": tx.muon(0.05), "*": ADAM}), whole=True, tolerance=1e-9),
    "masters": _of(MEAN, tx.mixed_precision(ADAM), dtype=torch.bfloat16, tolerance=LOSSY),
    "schedule": _of(MEAN, tx.adamw(tx.warmup_cosine(0.1, 2, 6)), whole=True),
    "zero": Row(lambda: tx.zero(MEAN, ADAM, "data"), whole=True),
    "zero, clipped": _of(tx.chain(SCATTER, tx.clip_by_global_norm(0.1)), ADAM, whole=True),
    "zero within nodes": _of(tx.chain(tx.scatter_mean("local"), tx.mean("node")), ADAM, axes=NODES, whole=True),
    "bfloat16": _of(tx.compress(tx.bfloat16(), MEAN), SGD, tolerance=LOSSY),
    "int8, feedback": _of(tx.error_feedback(tx.compress(tx.int8(block=4), MEAN)), SGD, tolerance=LOSSY),
    "PowerSGD": _of(tx.error_feedback(tx.power_sgd("data", min_compression_rate=0.5)), SGD),
    "hierarchical": _of(tx.hierarchical_mean("local", "node"), axes=NODES, whole=True),
    "average": _of(MEAN, after=EVERY, whole=True),
    "local SGD": Row(lambda: tx.local_sgd(MOMENTUM, tx.mean("data"), 2)),
    "local SGD, averaged states": Row(lambda: tx.local_sgd(MOMENTUM, tx.mean("data"), 2, state="average")),
    "post-local SGD": Row(lambda: tx.post_local_sgd(MOMENTUM, tx.mean("node"), 2, 1, hook=ALL, local=tx.mean("local")), NODES),
    "DiLoCo": Row(lambda: tx.diloco(MOMENTUM, tx.mean("data"), 2, tx.sgd(0.7, momentum=0.9, nesterov=True))),
    "DiLoCo, streaming": Row(lambda: tx.diloco(MOMENTUM, tx.mean("data"), 2, SGD, fragments=2, delay=1, mix=0.5)),
    "moving average": _of(MEAN, after=tx.ema(0.9), whole=True),
}  # fmt: skip
