"""The runs that are resumed on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fjoin
from fjoin import transforms as tx
from tests.checkpoint.runs import Run, part, quiet

INT8, NODES = tx.int8(block=4), {"node": 2, "local": 2}
FEEDBACK = tx.error_feedback(tx.compress(INT8, tx.mean("data")))
ADAMW, SGD = tx.adamw(0.05), tx.sgd(0.05, momentum=0.9)


def mean_and(optimizer: tx.Optimizer, **ends: Any) -> Callable[[], tx.Pipeline]:
    return lambda: tx.fuse(tx.mean("data"), optimizer, **ends)


def of_two_axes() -> tx.Pipeline:
    """Matrices are averaged over all ranks in each step, the others over the nodes in every third one."""
    coded = tx.error_feedback(tx.compress(INT8, tx.hierarchical_mean("local", "node")))
    hook = tx.partition({"*.weight": coded, "*": tx.mean("local")})
    return tx.fuse(hook, ADAMW, after=tx.every(3, tx.average_parameters("node")))


def sharded(matrices: tx.Optimizer, others: tx.Optimizer = ADAMW) -> Callable[[], tx.Pipeline]:
    return lambda: tx.zero(tx.mean("data"), tx.partition({"layer.weight": matrices, "*": others}), "data")


def streaming() -> tx.Pipeline:
    """A message begins in the steps 2, 4, 6 and 8, counted from 1, of one half of the parameters, and is used a step later."""
    return tx.diloco(ADAMW, tx.mean("data"), 4, fragments=2, delay=1, mix=0.25)


def post_local(module: nn.Module) -> Any:
    averager = fjoin.PeriodicModelAverager(period=2, warmup_steps=1)
    return fjoin.PostLocalSGDOptimizer(torch.optim.AdamW(module.parameters(), 0.1), averager)


def poisoned(*calls: int) -> list[list[int]]:
    """Rank 1 has numbers that are not finite in these calls."""
    return [[3, -1 if call in calls else 4] for call in range(8)]


def _object(make: Callable[[Any], Any], lost: str = "objects.optimizer") -> Run:
    return Run(make, how="optimizer", dtype=torch.float64, lost=lost)


UNEVEN = [[3, 4], [1, 0], [0, 2], [2, 2], [4, 0], [1, 3], [0, 0], [2, 1]]
RUNS: dict[str, Run] = {
    "two axes": Run(of_two_axes, NODES, lost="pipeline.hook.*.error.*"),
    "nodes apart, masters": Run(
        lambda: tx.fuse(tx.scatter_mean("local"), tx.mixed_precision(ADAMW), tx.outer_step(tx.mean("node"), tx.sgd(0.7), 3)),
        NODES, dtype=torch.bfloat16, lost="pipeline.after",
    ),
    "local SGD in its window": Run(lambda: tx.local_sgd(ADAMW, tx.mean("data"), 3), lost="pipeline.optimizer"),
    "DiLoCo, a message under way": Run(streaming, lost="pipeline.after.*.pending.*"),
    "buffers of each rank": Run(mean_and(SGD), loss="buffered", lost="buffers"),
    "buffers, averaged": Run(
        mean_and(SGD), loss="buffered", options={"on_buffers": tx.every(2, tx.average_buffers("data"))}, lost="buffers"
    ),
    "accumulated": Run(mean_and(ADAMW), cut=6, calls=12, options={"accumulate": 3}, lost="pipeline.optimizer"),
    "sharded muon and adafactor": Run(sharded(tx.muon(0.05), tx.adafactor(0.05)), lost="pipeline.optimizer"),
    "master copies": Run(mean_and(tx.mixed_precision(ADAMW)), dtype=torch.bfloat16, lost="pipeline.optimizer.*.master"),
    "loss scale": Run(
        lambda: tx.dynamic_loss_scale(mean_and(ADAMW)(), 8.0, growth_interval=3), sizes=poisoned(1, 6), lost="pipeline.streak"
    ),
    "left out": Run(lambda: tx.skip_if_nonfinite(mean_and(ADAMW)()), sizes=poisoned(2, 5), lost="pipeline.skipped"),
    "uneven": Run(lambda: tx.fuse(FEEDBACK, ADAMW), sizes=UNEVEN, background=True, lost="pipeline.hook.error_feedback#0.error"),
    "frozen": Run(mean_and(tx.partition({"layer.weight": tx.frozen(), "*": ADAMW})), lost="pipeline.optimizer"),
    "moving average behind an average": Run(
        lambda: tx.fuse(tx.identity(), ADAMW, after=tx.chain(tx.every(3, tx.average_parameters("data")), tx.ema(0.9))),
        lost="pipeline.after.ema#0",
    ),
    "module": Run(mean_and(ADAMW), how="module", dtype=torch.float64, lost="objects.handle"),
    "module, its buffers": Run(mean_and(ADAMW), how="module", lost="objects.model.seen*"),
    "module, int8 feedback": Run(
        lambda: tx.fuse(FEEDBACK, ADAMW), how="module", sizes=UNEVEN, lost="objects.handle.hook.*.error.*"
    ),
    "module, local SGD": Run(lambda: tx.local_sgd(ADAMW, tx.mean("data"), 3), how="module", lost="objects.handle"),
    "module, slices": Run(sharded(tx.muon(0.05)), how="module", dtype=torch.float64, lost="objects.handle.optimizer"),
    "module, slices in int8": Run(
        lambda: tx.fuse(tx.scatter_mean("data"), ADAMW, gather_codec=INT8), how="module", lost="objects.handle.gather"
    ),
    "module, left out": Run(
        lambda: tx.skip_if_nonfinite(tx.fuse(tx.chain(tx.mean("data"), tx.every(2, tx.clip_by_value(0.01))), ADAMW)),
        how="module", sizes=poisoned(2, 5), lost="objects.handle.skipped",
    ),
    "torch's optimizer": _object(lambda m: torch.optim.AdamW(m.parameters(), 0.1), "objects.model.bias"),
    "Optimizer": _object(lambda m: fjoin.Optimizer(m.named_parameters(), tx.adamw(0.1))),
    "ZeroRedundancyOptimizer": _object(lambda m: fjoin.ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.1)),
    "ZeroRedundancyOptimizer, whole parameters": _object(
        lambda m: fjoin.ZeroRedundancyOptimizer([p for p in m.parameters() if p.dim() == 2], tx.muon, lr=0.1)
    ),
    "ZeroRedundancyOptimizer, masters": _object(
        lambda m: fjoin.ZeroRedundancyOptimizer(m.parameters(), lambda lr: tx.mixed_precision(tx.adamw(lr)), lr=0.1)
    )._replace(dtype=torch.bfloat16),
    "PostLocalSGDOptimizer": _object(post_local, "objects.model.bias"),
}  # fmt: skip


def on_this_rank(name: str, axes: dict[str, int], transport: str, folder: str, *args: Any) -> Any:
    with mock.patch.dict(os.environ, {"FJOIN_TRANSPORT": transport}), quiet():
        return part(RUNS[name]._replace(axes=axes), dist.get_rank(), folder, *args)
