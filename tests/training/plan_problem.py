"""Pipelines and inputs on which the pure pipeline, the step and a registered module are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged

NAN = math.nan
SGD, MOMENTUM = tx.sgd(0.5), tx.sgd(0.5, momentum=0.9, weight_decay=0.1)
NODES = {"node": 2, "local": 2}


def product(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch).sum() + 2 * (params["v"] * batch).sum()


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.ones(2, dtype=dtype), "v": torch.zeros(3, dtype=dtype)}


def weight_of(batch: Any) -> float:
    return 0.0 if batch is None else 1.0 if math.isnan(batch) else abs(batch)


def purely(pipeline: tx.Pipeline, batches: Sequence[Any], dtype: torch.dtype = torch.float64) -> Any:
    """The parameters after each step of the pure pipeline; a batch of None is none. The last: its state."""
    params: Any = start(dtype)
    state, seen = pipeline.init(params), []
    for batch in batches:
        value = 0.0 if batch is None else batch
        grads = {"w": torch.full_like(params["w"], value), "v": torch.full_like(params["v"], 2 * value)}
        params, state = pipeline.step(params, grads, state, weight=weight_of(batch))
        seen.append(params)
    return seen, state


def by_step(
    pipeline: tx.Pipeline, axes: dict[str, int], batches: Sequence[Any], on_device: bool, dtype: torch.dtype = torch.float64
) -> Any:  # fmt: skip
    step = judged(fjoin.train_step(product, pipeline, mesh=fjoin.mesh(axes), weight=weight_of), on_device)
    state, seen = step.init(start(dtype)), []
    for batch in batches:
        state, _ = step(state, batch)
        seen.append({path: p.clone() for path, p in state.params.items()})
    return seen, state.clone().pipeline


def summed_by_hand(grad: Tensor) -> Tensor:
    return tx.psum(grad, "data") / 4


EVERY = tx.every(2, tx.mean("data"))
ALL = tx.mean(("node", "local"))
FED_BACK = tx.error_feedback(tx.compress(tx.int8(), tx.mean("data")))
OFTEN = tx.every(1, tx.average_parameters("local"), first=0, except_every=2)
RARELY = tx.every(2, tx.average_parameters(("node", "local")), first=0)
PIPELINES = {
    "mean": tx.fuse(tx.mean("data"), MOMENTUM),
    "mean, then an average": tx.fuse(tx.mean("data"), MOMENTUM, after=EVERY),
    "local steps": tx.fuse(tx.identity(), MOMENTUM, after=EVERY),
    "local steps of nodes": tx.fuse(tx.mean("local"), MOMENTUM, after=tx.every(2, tx.mean("node"))),
    "two periods": tx.fuse(
        tx.mean("local"), MOMENTUM, after=tx.chain(tx.every(2, tx.mean("local")), tx.every(3, tx.mean(("node", "local"))))
    ),
    "live": tx.fuse(tx.mean("data", over="live"), MOMENTUM, after=tx.every(2, tx.mean("data", over="live"))),
    "world": tx.fuse(tx.mean("data", over="world"), MOMENTUM, after=EVERY),
    "now and then": tx.fuse(EVERY, MOMENTUM),
    "first means, then local steps": tx.fuse(tx.switch_after(3, tx.mean("data"), tx.identity()), MOMENTUM, after=EVERY),
    "two stages": tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), MOMENTUM, after=EVERY),
    "one leaf": tx.fuse(tx.masked(tx.mean("data"), "w"), MOMENTUM),
    "by hand": tx.fuse(tx.stateless(summed_by_hand), MOMENTUM),
    "in fewer bits": tx.fuse(tx.compress(torch.bfloat16, tx.mean("data")), SGD, after=EVERY),
    "local SGD": tx.local_sgd(MOMENTUM, tx.mean("data"), 2, state="average"),
    "post-local SGD": tx.post_local_sgd(MOMENTUM, tx.mean("node"), 2, 1, state="average", hook=ALL, local=tx.mean("local")),
    "post-local SGD, encoded": tx.post_local_sgd(MOMENTUM, FED_BACK, 2, 1, hook=tx.mean("data")),
    "hierarchical": tx.fuse(tx.identity(), MOMENTUM, after=tx.chain(OFTEN, RARELY)),
    "DiLoCo": tx.diloco(MOMENTUM, tx.mean("data"), 2, tx.sgd(0.7, momentum=0.9, nesterov=True)),
    "DiLoCo between nodes": tx.diloco(MOMENTUM, tx.mean("node"), 2, tx.adam(0.1), hook=tx.mean("local")),
    "streaming": tx.diloco(MOMENTUM, tx.mean("data"), 2, tx.sgd(0.7, momentum=0.9), fragments=2, delay=1, mix=0.5),
    "moving average": tx.fuse(tx.identity(), MOMENTUM, after=tx.every(2, tx.chain(tx.average_parameters("data"), tx.ema(0.9)))),
    "encoded": tx.fuse(FED_BACK, SGD, after=EVERY),
}  # fmt: skip
UNEVEN = {
    "even": [[1.0, 2.0, 1.0, 3.0], [2.0, 1.0, 4.0, 1.0], [1.0, 1.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0]],
    "uneven": [[1.0, 2.0, 1.0, 3.0], [2.0, None, None, None], [1.0, 1.0, None, None], [None] * 4],
    "a node without input": [[1.0, 2.0, 1.0, 3.0], [2.0, 1.0, 2.0, None], [None] * 4, [1.0, None, None, None]],
    "a step without input": [[1.0, None, 1.0, None], [2.0, None, 1.0, None], [1.0, None, None, None], [None] * 4],
}


def axes_for(pipeline: tx.Pipeline) -> dict[str, int]:
    return NODES if "'local'" in repr(pipeline) else {"data": 4}
