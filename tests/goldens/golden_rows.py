"""The pipelines whose behaviour is recorded, each with its axes and its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fjoin import transforms as tx
from tests.rows import PLANS
from tests.sharded_problem import PAIRS
from tests.transform_table import TRANSFORMS

TWO, THREE, NODES = {"data": 2}, {"data": 3}, {"node": 2, "local": 2}
# A row is explained for the worlds that have its axes.
WORLDS = [{"data": 8}, {"node": 2, "local": 4}]

MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
MOMENTUM = tx.sgd(0.125, momentum=0.5, weight_decay=0.125)
ADAM = tx.adamw(0.1)
INT8 = tx.int8(block=4)


class Row(NamedTuple):
    make: Callable[[], tx.Pipeline]
    axes: dict[str, int]
    dtype: torch.dtype = torch.float32
    poisoned: bool = False  # rank 1 has a gradient that is not finite in step 2


def axes_of(text: str, data: dict[str, int]) -> dict[str, int]:
    return NODES if "'local'" in text or "'node'" in text else data


def _root_of_weight(inner: tx.Transform) -> tx.Transform:
    """The mean of another weight than the step's."""

    def update(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        own = torch.as_tensor(1.0 if weight is None else weight, dtype=torch.float64) ** 0.5
        return inner.update(grads, state, params, weight=own)

    return tx.Transform(inner.init, update, needs=tx.Needs.LEAVES)


AFTER = {"average_parameters", "ema", "outer_step"}
OF_BUFFERS = {"average_buffers", "broadcast_buffers"}


def _of_transform(name: str, make: Callable[[], tx.Transform]) -> Row:
    axes = TWO if name == "from_optax" else axes_of(repr(make()), TWO)  # importing optax takes seconds
    if name in AFTER:
        return Row(lambda: tx.fuse(tx.identity(), MOMENTUM, after=make()), axes)
    return Row(lambda: tx.fuse(make(), MOMENTUM), axes, poisoned=name == "skip_if_nonfinite")


def _of_pair(pair: Any, pipeline: tx.Pipeline) -> Row:
    poisoned = "skip_if_nonfinite" in repr(pipeline) or "dynamic_loss_scale" in repr(pipeline)
    return Row(lambda: pipeline, pair.axes or TWO, pair.options.get("dtype", torch.float32), poisoned=poisoned)


def _skip(hook: tx.Transform, optimizer: tx.Optimizer = MOMENTUM) -> Row:
    return Row(lambda: tx.skip_if_nonfinite(tx.fuse(hook, optimizer)), THREE, poisoned=True)


BF16, F16 = torch.bfloat16, torch.float16
OTHERS: dict[str, Row] = {
    "mean": Row(lambda: tx.fuse(MEAN, MOMENTUM), THREE), "mean of two": Row(lambda: tx.fuse(MEAN, MOMENTUM), TWO),
    "mean, Adam": Row(lambda: tx.fuse(MEAN, ADAM), THREE), "zero": Row(lambda: tx.zero(MEAN, ADAM, "data"), THREE),
    "scatter, clip": Row(lambda: tx.fuse(tx.chain(SCATTER, tx.clip_by_global_norm(0.5)), ADAM), THREE),
    "loss scale": Row(lambda: tx.dynamic_loss_scale(tx.fuse(MEAN, MOMENTUM), 8.0, growth_interval=2), THREE, poisoned=True),
    "loss scale, int8": Row(
        lambda: tx.dynamic_loss_scale(tx.fuse(tx.compress(INT8, tx.mean("data")), MOMENTUM), 8.0, growth_interval=2),
        TWO,
        poisoned=True,
    ),
    "skip": _skip(MEAN), "skip, masked": _skip(tx.masked(MEAN, "layer.*")),
    "skip, int8": _skip(tx.compress(INT8, tx.mean("data"))), "skip, identity": _skip(tx.identity()),
    "skip, zero": _skip(SCATTER, ADAM), "float16": Row(lambda: tx.fuse(MEAN, MOMENTUM), THREE, F16),
    "float16, zero": Row(lambda: tx.zero(MEAN, ADAM, "data"), TWO, F16),
    "bfloat16": Row(lambda: tx.fuse(MEAN, MOMENTUM), THREE, BF16),
    "float64": Row(lambda: tx.fuse(MEAN, ADAM), THREE, torch.float64),
    "masters": Row(lambda: tx.fuse(MEAN, tx.mixed_precision(ADAM)), THREE, BF16),
    "masters, average of states": Row(
        lambda: tx.fuse(
            tx.identity(),
            tx.mixed_precision(ADAM),
            after=tx.every(2, tx.average_parameters("data")),
            on_state=tx.every(3, tx.average_state("data")),
        ),
        TWO,
        BF16,
    ),
    "first whole, then int8": Row(lambda: tx.fuse(tx.switch_after(2, MEAN, tx.compress(INT8, tx.mean("data"))), MOMENTUM), THREE),
    "power_sgd": Row(lambda: tx.fuse(tx.error_feedback(tx.power_sgd("data", min_compression_rate=0.5, warmup_steps=1)), MOMENTUM), THREE),
    "zero, int8 gather": Row(lambda: tx.fuse(SCATTER, ADAM, gather_codec=INT8), THREE),
    "zero, int8 both ways": Row(lambda: tx.fuse(tx.error_feedback(tx.compress(INT8, SCATTER)), ADAM, gather_codec=INT8), THREE),
    "zero of nodes, int8 gather": Row(lambda: tx.fuse(tx.chain(tx.scatter_mean("local"), tx.mean("node")), ADAM, gather_codec=INT8), NODES),
    "partition by axes": Row(lambda: tx.fuse(tx.partition({"layer.*": tx.mean("local"), "*": tx.mean("node")}), MOMENTUM), NODES),
    "partition by kinds": Row(lambda: tx.fuse(tx.partition({"layer.*": tx.compress(INT8, tx.mean("data")), "*": MEAN}), MOMENTUM), THREE),
    "masked by axis": Row(lambda: tx.fuse(tx.chain(tx.masked(tx.mean("local"), "layer.*"), tx.mean("node")), MOMENTUM), NODES),
    "mean of means": Row(lambda: tx.fuse(tx.chain(tx.mean("local"), tx.mean("node", over="live")), MOMENTUM), NODES),
    "by hand, root of the weight": Row(lambda: tx.fuse(_root_of_weight(MEAN), MOMENTUM), TWO),
}  # fmt: skip

ROWS: dict[str, Row] = {
    **{
        f"plan: {name}": Row(lambda p=p: p, axes_of(repr(p), THREE), torch.float64)
        for name, p in PLANS.items()
    },
    **{f"sharded: {name}": _of_pair(pair, pair.sharded) for name, pair in PAIRS.items()},
    **{f"whole: {name}": _of_pair(pair, pair.whole) for name, pair in PAIRS.items()},
    **{f"{name} {i}": _of_transform(name, make) for name, rows in TRANSFORMS.items() if name not in OF_BUFFERS
       for i, make in enumerate(rows)},
    **{f"other: {name}": row for name, row in OTHERS.items()},
}  # fmt: skip
