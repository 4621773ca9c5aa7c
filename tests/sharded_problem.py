"""A few parameters, with random gradients and uneven weights, and pairs of pipelines of which one shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fjoin import transforms as tx

# Leaves that lie across every cut, are smaller than a piece, or have no elements.
SHAPES = {
    "a.weight": (9, 7), "a.bias": (9,), "b.weight": (33, 3), "scale": (), "empty": (0, 3), "b.bias": (33,), "c.weight": (4, 4),
}  # fmt: skip
STEPS = 12


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return {path: torch.randn(shape, generator=gen).to(dtype) for path, shape in SHAPES.items()}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(100 * rank + step)
    return {path: torch.randn(shape, generator=gen).to(dtype) for path, shape in SHAPES.items()}


def loss_fn(params: Any, batch: Any) -> Tensor:
    return sum((p * g).sum() for p, g in zip(params.values(), batch[0].values(), strict=True))  # type: ignore[return-value]


def weight(rank: int, step: int) -> float:
    """Uneven; the last ranks have no input in some steps, and no rank has in step 5."""
    return 0.0 if step == 5 or (rank and (rank + step) % 4 == 0) else 1.0 + (rank + step) % 3


def run(
    pipeline: tx.Pipeline, sizes: dict[str, int], dtype: torch.dtype = torch.float32, steps: int = STEPS,
    change: Callable[[int, int, dict[str, Tensor]], dict[str, Tensor]] = lambda rank, step, g: g,
) -> list[Any]:  # fmt: skip
    ranks = functools.reduce(int.__mul__, sizes.values(), 1)

    def one_rank(rank: int) -> Any:
        params = start(dtype)
        state = pipeline.init(params)
        for step in range(steps):
            grads = change(rank, step, gradients(rank, step, dtype))
            params, state = pipeline.step(params, grads, state, weight=weight(rank, step))
        return params, state

    return tx.simulate(one_rank, sizes, list(range(ranks)))


ADAM = tx.adamw(tx.linear(0.1, 0.01, 9))
MUON = tx.partition({"*.weight": tx.muon(0.1), "*": tx.adamw(0.1)})
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
CLIP = tx.clip_by_global_norm(0.5)
NODES = {"node": 2, "local": 2}


class Pair(NamedTuple):
    sharded: tx.Pipeline
    whole: tx.Pipeline
    axes: dict[str, int] = {}
    tolerance: float = 0.0  # relative; 0: equal to the bit
    options: dict[str, Any] = {}  # of train_step


INNER = tx.chain(tx.mean("local"), tx.mean("node"))
PAIRS = {
    "live": Pair(tx.zero(tx.mean("data", over="live"), ADAM, "data"), tx.fuse(tx.mean("data", over="live"), ADAM)),
    "world": Pair(tx.zero(tx.mean("data", over="world"), ADAM, "data"), tx.fuse(tx.mean("data", over="world"), ADAM)),
    "clip": Pair(tx.fuse(tx.chain(SCATTER, CLIP), ADAM), tx.fuse(tx.chain(MEAN, CLIP), ADAM), tolerance=1e-5),
    "clip, Muon": Pair(tx.fuse(tx.chain(SCATTER, CLIP), MUON), tx.fuse(tx.chain(MEAN, CLIP), MUON), tolerance=2e-2),
    "values": Pair(tx.fuse(tx.chain(SCATTER, tx.clip_by_value(0.5)), ADAM), tx.fuse(tx.chain(MEAN, tx.clip_by_value(0.5)), ADAM)),
    "before": Pair(tx.fuse(tx.chain(tx.clip_by_value(0.5), SCATTER), ADAM), tx.fuse(tx.chain(tx.clip_by_value(0.5), MEAN), ADAM)),
    "skip": Pair(tx.skip_if_nonfinite(tx.fuse(SCATTER, MUON)), tx.skip_if_nonfinite(tx.fuse(MEAN, MUON))),
    "scale": Pair(
        tx.dynamic_loss_scale(tx.fuse(SCATTER, ADAM), 8.0, growth_interval=3),
        tx.dynamic_loss_scale(tx.fuse(MEAN, ADAM), 8.0, growth_interval=3),
    ),
    "masters": Pair(tx.fuse(SCATTER, tx.mixed_precision(ADAM)), tx.fuse(MEAN, tx.mixed_precision(ADAM)), options={"dtype": torch.bfloat16}),
    "nodes": Pair(tx.fuse(tx.chain(tx.scatter_mean("local"), tx.mean("node")), MUON), tx.fuse(INNER, MUON), NODES),
    "nodes, by zero": Pair(tx.zero(tx.mean(("node", "local")), ADAM, "local"), tx.fuse(tx.mean(("node", "local")), ADAM), NODES, 1e-5),
    "nodes apart": Pair(
        tx.fuse(tx.scatter_mean("local"), ADAM, tx.every(2, tx.average_parameters("node"))),
        tx.fuse(tx.mean("local"), ADAM, tx.every(2, tx.average_parameters("node"))),
        NODES,
    ),
    "nodes apart, masters": Pair(
        tx.fuse(tx.scatter_mean("local"), tx.mixed_precision(ADAM), tx.outer_step(tx.mean("node"), tx.sgd(0.7), 2)),
        tx.fuse(tx.mean("local"), tx.mixed_precision(ADAM), tx.outer_step(tx.mean("node"), tx.sgd(0.7), 2)),
        NODES,
        options={"dtype": torch.bfloat16},
    ),
}  # fmt: skip
