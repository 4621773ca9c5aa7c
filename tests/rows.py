"""The pipelines that are trained in all places, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.changed_weights import ALL as REDUCTIONS, CHANGES, AroundState, axes_for, with_weights

TWO, THREE, NODES = {"data": 2}, {"data": 3}, {"node": 2, "local": 2}
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
SGD, MOMENTUM, ADAM = tx.sgd(0.1), tx.sgd(0.1, momentum=0.9, weight_decay=0.1), tx.adamw(0.05)
EVERY = tx.every(2, tx.mean("data"))
ALL = tx.mean(("node", "local"))


class Row(NamedTuple):
    """A pipeline.

    Attributes:
        whole: Whether one process on the batches of all ranks comes to the same.
        tolerance: Of parameters between places, far below what they move; larger where a message's blocks are those of a bucket.
        options: Of train_step.
        scaled: Whether the loss is scaled.
    """

    make: Callable[[], tx.Pipeline]
    axes: dict[str, int] = THREE
    whole: bool = False
    loss: str = "net"
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    options: dict[str, Any] = {}
    scaled: bool = False


def _of(hook: tx.Transform, optimizer: tx.Optimizer = MOMENTUM, **settings: Any) -> Row:
    ends = {key: settings.pop(key) for key in ("after", "on_state") if key in settings}
    return Row(lambda: tx.fuse(hook, optimizer, **ends), **settings)


def _scaled(hook: tx.Transform, whole: bool = False) -> Row:
    """The scale changes in every step: to 8 times of what it was, or to half."""
    scales = {"init_scale": 4.0, "growth_factor": 8.0, "growth_interval": 1}
    return Row(lambda: tx.dynamic_loss_scale(tx.fuse(hook, MOMENTUM), **scales), whole=whole, scaled=True)


def summed_by_hand(grad: Tensor) -> Tensor:
    return tx.psum(grad, "data") / 4


PLAIN, HEAVY = tx.sgd(0.5), tx.sgd(0.5, momentum=0.9, weight_decay=0.1)
FED_BACK = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
OFTEN = tx.every(1, tx.average_parameters("local"), first=0, except_every=2)
RARELY = tx.every(2, tx.average_parameters(("node", "local")), first=0)
PLANS = {
    "mean": tx.fuse(tx.mean("data"), HEAVY), "mean, then an average": tx.fuse(tx.mean("data"), HEAVY, after=EVERY),
    "local steps": tx.fuse(tx.identity(), HEAVY, after=EVERY),
    "local steps of nodes": tx.fuse(tx.mean("local"), HEAVY, after=tx.every(2, tx.mean("node"))),
    "two periods": tx.fuse(
        tx.mean("local"), HEAVY, after=tx.chain(tx.every(2, tx.mean("local")), tx.every(3, tx.mean(("node", "local"))))
    ),
    "live": tx.fuse(tx.mean("data", over="live"), HEAVY, after=tx.every(2, tx.mean("data", over="live"))),
    "world": tx.fuse(tx.mean("data", over="world"), HEAVY, after=EVERY), "now and then": tx.fuse(EVERY, HEAVY),
    "first means, then local steps": tx.fuse(tx.switch_after(3, tx.mean("data"), tx.identity()), HEAVY, after=EVERY),
    "two stages": tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), HEAVY, after=EVERY),
    "one leaf": tx.fuse(tx.masked(tx.mean("data"), "w"), HEAVY),
    "by hand": tx.fuse(tx.stateless(summed_by_hand), HEAVY),
    "in fewer bits": tx.fuse(tx.compress(torch.bfloat16, tx.mean("data")), PLAIN, after=EVERY),
    "local SGD": tx.local_sgd(HEAVY, tx.mean("data"), 2, state="average"),
    "post-local SGD": tx.post_local_sgd(HEAVY, tx.mean("node"), 2, 1, state="average", hook=ALL, local=tx.mean("local")),
    "post-local SGD, encoded": tx.post_local_sgd(HEAVY, FED_BACK, 2, 1, hook=tx.mean("data")),
    "hierarchical": tx.fuse(tx.identity(), HEAVY, after=tx.chain(OFTEN, RARELY)),
    "DiLoCo": tx.diloco(HEAVY, tx.mean("data"), 2, tx.sgd(0.7, momentum=0.9, nesterov=True)),
    "DiLoCo between nodes": tx.diloco(HEAVY, tx.mean("node"), 2, tx.adam(0.1), hook=tx.mean("local")),
    "streaming": tx.diloco(HEAVY, tx.mean("data"), 2, tx.sgd(0.7, momentum=0.9), fragments=2, delay=1, mix=0.5),
    "moving average": tx.fuse(tx.identity(), HEAVY, after=tx.every(2, tx.chain(tx.average_parameters("data"), tx.ema(0.9)))),
    "encoded": tx.fuse(FED_BACK, PLAIN, after=EVERY),
}  # fmt: skip


@tx.factory
def by_effective_ranks(hook: tx.Transform) -> tx.Transform:
    """The mean times (sum of weights)^2 / (sum of squared weights), which is the number of ranks if they are equal."""

    def update(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        own = torch.as_tensor(1.0 if weight is None else weight, dtype=torch.float64)
        total, squares = tx.psum((own, own * own), "data")
        out, new = hook.update(grads, state.inner, params, weight=weight, **extra)
        ranks = total**2 / squares.clamp(min=1e-9)
        return {path: g * ranks.to(g.dtype) for path, g in out.items()}, AroundState(new)

    return tx.Transform(
        lambda params: AroundState(hook.init(params)),
        update,
        hook.needs,
        facts=tx.Facts(compression=hook.facts.compression, wraps="whole"),
    )


BLOCKS = 3e-4  # of int8
SINGLE = tx.compress(tx.float32(), MEAN)
ROWS: dict[str, Row] = {
    "mean": _of(MEAN, whole=True), "mean, Adam": _of(MEAN, ADAM, axes=TWO, whole=True),
    "mean, a linear loss": _of(MEAN, loss="linear", whole=True), "mean, buffers": _of(MEAN, loss="buffered"),
    "mean over live ranks": _of(tx.mean("data", over="live")),
    "mean over the world": _of(tx.mean("data", over="world")),
    "mean over two axes": _of(tx.mean(("node", "local")), axes=NODES, whole=True),
    "mean of means": _of(tx.chain(tx.mean("local"), tx.mean("node")), axes=NODES, whole=True),
    "sum": _of(tx.sum_over("data")), "clipped": _of(tx.chain(MEAN, tx.clip_by_global_norm(0.1)), whole=True),
    "clipped first": _of(tx.chain(tx.clip_by_value(0.05), MEAN)),
    "by path": _of(tx.partition({"layer.*": MEAN, "*": tx.mean("data", over="live")})),
    "masked": _of(tx.masked(MEAN, "layer.*")),
    "one part alone": _of(tx.partition({"layer.*": MEAN, "*": tx.identity()})),
    "one part alone, then all": _of(tx.switch_after(2, tx.masked(SINGLE, "layer.*"), MEAN), tolerance=1e-6),
    "a function alone": _of(tx.stateless(torch.neg)),
    "then another": _of(tx.switch_after(2, MEAN, tx.mean("data", over="live"))),
    "skip": Row(lambda: tx.skip_if_nonfinite(tx.fuse(MEAN, MOMENTUM)), whole=True),
    **{f"loss scale, {name}": _scaled(hook, name == "clipped") for name, hook in (
        ("mean", MEAN), ("clipped", tx.chain(MEAN, tx.clip_by_global_norm(0.1))), ("clipped first", tx.chain(tx.clip_by_value(0.05), MEAN)),
    )}, "frozen": _of(MEAN, tx.partition({"layer.*": tx.frozen(), "*": ADAM}), whole=True),
    "Muon": _of(MEAN, tx.partition({"layer.*": tx.muon(0.05), "*": ADAM}), whole=True, tolerance=1e-9),
    "masters": _of(MEAN, tx.mixed_precision(ADAM), dtype=torch.bfloat16, tolerance=0.01),
    "schedule": _of(MEAN, tx.adamw(tx.warmup_cosine(0.1, 2, 6)), whole=True),
    "zero": Row(lambda: tx.zero(MEAN, ADAM, "data"), whole=True),
    "zero, Muon": Row(lambda: tx.zero(MEAN, tx.partition({"layer.*": tx.muon(0.05), "*": ADAM}), "data"), whole=True, tolerance=1e-9),
    "zero, clipped": _of(tx.chain(SCATTER, tx.clip_by_global_norm(0.1)), ADAM, whole=True),
    "zero within nodes, int8 between": _of(
        tx.chain(tx.scatter_mean("local"), tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("node")))), SGD,
        axes=NODES, tolerance=BLOCKS,
    ),
    "zero within nodes": _of(tx.chain(tx.scatter_mean("local"), tx.mean("node")), ADAM, axes=NODES, whole=True),
    "bfloat16": _of(tx.compress(tx.bfloat16(), MEAN), SGD),
    "int8, feedback": _of(tx.error_feedback(tx.compress(tx.int8(block=4), MEAN)), SGD, tolerance=BLOCKS),
    "PowerSGD": _of(tx.error_feedback(tx.power_sgd("data", min_compression_rate=0.5)), SGD),
    "hierarchical mean": _of(tx.hierarchical_mean("local", "node"), axes=NODES, whole=True),
    "hierarchical mean, int8": _of(
        tx.compress(tx.int8(block=4), tx.hierarchical_mean("local", "node")), SGD, axes=NODES, tolerance=BLOCKS
    ),
    "local SGD": Row(lambda: tx.local_sgd(MOMENTUM, tx.mean("data"), 2)),
    "local SGD, own schedule": Row(lambda: tx.local_sgd(tx.sgd(lambda step: 0.1 * (1 - step / 40)), tx.mean("data"), 2)),
    "now and then, own schedule": Row(lambda: tx.fuse(EVERY, tx.sgd(lambda step: 0.1 * (1 - step / 40)))),
    "post-local SGD": Row(lambda: tx.post_local_sgd(MOMENTUM, tx.mean("node"), 2, 1, hook=ALL, local=tx.mean("local")), NODES),
    "local SGD, masters": Row(lambda: tx.local_sgd(tx.mixed_precision(MOMENTUM), MEAN, 2), dtype=torch.bfloat16, tolerance=0.01),
    "late, encoded": Row(
        lambda: tx.diloco(HEAVY, tx.error_feedback(SINGLE), 3, tx.sgd(0.7), fragments=2, delay=2, mix=0.5), tolerance=1e-6
    ),
    "late, all the time": Row(lambda: tx.diloco(HEAVY, MEAN, 2, tx.sgd(0.7), delay=1), options={"donate": False}),
    "ema": _of(MEAN, after=tx.ema(0.9), whole=True),
    "own sums": _of(tx.chain(tx.clip_by_value(9.0), by_effective_ranks(tx.error_feedback(SINGLE))), tolerance=1e-6),
    "own sums, by path": _of(tx.partition({"layer.*": by_effective_ranks(MEAN), "*": MEAN})),
    **{
        f"roots of weights: {name}": _of(
            with_weights(CHANGES["root"], make()), SGD, axes=axes_for(name, 3), tolerance=1e-6 if "int8" not in repr(make()) else BLOCKS
        )
        for name, make in REDUCTIONS.items()
        if name not in ("accumulated", "masked", "batched low rank", "top_k", "int4, fed back")  # of other blocks, or a path
    },
    **{
        name: Row(lambda p=p: p, NODES if "'local'" in repr(p) else {"data": 4}, tolerance=2e-3 if name == "encoded" else 1e-12)
        for name, p in PLANS.items()
        if name not in ("mean", "one leaf", "post-local SGD", "in fewer bits", "local SGD")
    },
}  # fmt: skip
