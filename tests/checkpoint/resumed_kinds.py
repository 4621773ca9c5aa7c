"""The kinds of runs that are resumed on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fjoin import transforms as tx

INT8 = tx.int8(block=4)


class Kind(NamedTuple):
    """A kind of run.

    Attributes:
        lost: A part of the checkpoint that the run would miss; "streams": those of random numbers.
        how: "calls" of a step, a "loop" that is joined, or a "module".
    """

    pipeline: Callable[[], tx.Pipeline]
    lost: str
    how: str = "calls"
    axes: dict[str, int] = {"data": 2}
    options: dict[str, Any] = {}
    model: str = "plain"
    dtype: torch.dtype = torch.float32
    poisoned: tuple[int, ...] = ()  # calls in which the loss of rank 1 is not finite
    workers: int = 0
    uneven: bool = False


def of_two_axes() -> tx.Pipeline:
    """The weights are averaged over all ranks in each step, the biases over the nodes in every third one."""
    coded = tx.error_feedback(tx.compress(INT8, tx.hierarchical_mean("local", "node")))
    hook = tx.partition({"*.weight": coded, "*": tx.mean("local")})
    return tx.fuse(hook, tx.adamw(0.05), after=tx.every(3, tx.average_parameters("node")))


def sharded() -> tx.Pipeline:
    optimizer = tx.partition({"*.weight": tx.muon(0.05), "*": tx.adafactor(0.05)})
    return tx.zero(tx.mean("data"), optimizer, "data")


def streaming() -> tx.Pipeline:
    """A message begins in the steps 2, 4, 6 and 8, counted from 1, of one half of the parameters, and is used a step later."""
    return tx.diloco(tx.adamw(0.05), tx.mean("data"), 4, fragments=2, delay=1, mix=0.25)


def mean_and(optimizer: tx.Optimizer, **ends: Any) -> tx.Pipeline:
    return tx.fuse(tx.mean("data"), optimizer, **ends)


ADAMW, SGD = tx.adamw(0.05), tx.sgd(0.05, momentum=0.9)
KINDS: dict[str, Kind] = {
    "two axes": Kind(of_two_axes, "pipeline.hook.*.error.*", axes={"node": 2, "local": 2}),
    "local SGD in its window": Kind(lambda: tx.local_sgd(ADAMW, tx.mean("data"), 3), "pipeline.optimizer"),
    "DiLoCo, a message under way": Kind(streaming, "pipeline.after.*.pending.*"),
    "module, int8 feedback": Kind(
        lambda: tx.fuse(tx.error_feedback(tx.compress(INT8, tx.mean("data"))), ADAMW), "objects.handle.hook.*.error.*", "module"
    ),
    "buffers of each rank": Kind(lambda: mean_and(SGD), "buffers", model="norm"),
    "buffers, averaged": Kind(
        lambda: mean_and(SGD), "buffers", model="norm",
        options={"on_buffers": tx.every(2, tx.average_buffers("data"))},
    ),
    "shuffled, dropout, workers": Kind(lambda: mean_and(SGD), "streams", "loop", model="dropout", workers=2),
    "accumulated": Kind(lambda: mean_and(ADAMW), "pipeline.optimizer", options={"accumulate": 3}),
    "sharded muon and adafactor": Kind(sharded, "pipeline.optimizer"),
    "master copies": Kind(lambda: mean_and(tx.mixed_precision(ADAMW)), "pipeline.optimizer.*.master", dtype=torch.bfloat16),
    "loss scale": Kind(
        lambda: tx.dynamic_loss_scale(mean_and(ADAMW), 8.0, growth_interval=3), "pipeline.streak", poisoned=(1, 6)
    ),
    "left out": Kind(lambda: tx.skip_if_nonfinite(mean_and(ADAMW)), "pipeline.skipped", poisoned=(2, 5)),
    "uneven": Kind(
        lambda: tx.fuse(tx.error_feedback(tx.compress(INT8, tx.mean("data"))), ADAMW), "pipeline.hook.error_feedback#0.error", "loop",
        uneven=True,
    ),
    "frozen, unused": Kind(
        lambda: mean_and(tx.partition({"0.weight": tx.frozen(), "*": ADAMW})), "pipeline.optimizer", model="unused"
    ),
    "moving average behind an average": Kind(
        lambda: tx.fuse(tx.identity(), ADAMW, after=tx.chain(tx.every(3, tx.average_parameters("data")), tx.ema(0.9))),
        "pipeline.after.ema#0",
    ),
}  # fmt: skip
